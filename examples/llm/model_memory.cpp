// The memory of a model: the plan, and the buffers of keys and values and of activations.
#include <algorithm>
#include <numeric>

#include "model.h"

namespace llm {

namespace {

std::string megabytes(size_t bytes) { return std::to_string((bytes + 999999) / 1000000) + " MB"; }

}  // namespace

std::string Plan::changes() const {
  std::vector<std::string> all;
  for (const auto& [types, n] : changed)
    all.push_back(concat(n, n == 1 ? " matrix" : " matrices", " converted from ", name_of(types.first), " to ",
                         name_of(types.second)));
  std::string out = all.empty() ? "" : listed(all) + " (the stored type is not compiled in for this device)";
  if (is_tight())
    out += concat(out.empty() ? "" : "; ", megabytes(mapped), " memory-mapped and ", megabytes(total()),
                  " of other memory, but ", megabytes(free), " free: weights are read from disk at every step (slow)");
  return out;
}

// int8 adds a scale for each head.
size_t Model::key_bytes() const {
  const int64_t head = config_.head_dim * bits_of(cache_type_) / 8 + (cache_type_ == Type::i8 ? 4 : 0);
  return size_t(2 * config_.kv_heads * head) * config_.layers.size();
}

// The workspace of attention, for a chunk of a prompt or a step.
size_t Model::workspace_bytes() const {
  size_t bytes = 0;
  const AttendCalls& calls = *device_.attend(cache_type_);
  for (int64_t each = 1; each <= kChunkQueries; ++each)
    bytes = std::max(bytes, calls.bytes(place_, {1, each}, config_.shape()));
  return std::max(bytes, calls.bytes(place_, {options_.sequences, 1}, config_.shape()));
}

// Where the weights of a layer's largest product fit in 16 bits.
size_t Model::decoded_bytes() const {
  const Config& c = config_;
  const ProductCalls* const calls = options_.weights < 0 ? nullptr : device_.products(Type(options_.weights));
  if (calls == nullptr || options_.batch_invariant || calls->decodes_from == 0 || rows_ < calls->decodes_from) return 0;
  const int64_t qkv = (c.heads + 2 * c.kv_heads) * c.head_dim, feed = 2 * std::max(c.inner, c.shared_inner);
  return size_t(std::max(qkv, feed)) * size_t(c.hidden) * 2;
}

// Plans the memory of keys and values and of activations. Without --context there are as many tokens as have room.
void Model::plan_memory() {
  const Config& c = config_;
  cache_type_ = options_.cache >= 0 ? Type(options_.cache) : embedding_.type;
  if (options_.cache < 0 && device_.attend(cache_type_) == nullptr) cache_type_ = Type::f16;
  if (device_.attend(cache_type_) == nullptr)
    throw Error("a KV cache of ", name_of(cache_type_), " is not compiled in for this device; --cache takes ",
                names_of([&](Type type) { return device_.attend(type) != nullptr; }));
  const auto plan = [&] {
    rows_ = std::max({options_.chunk, options_.sequences, options_.guesses + 1});
    logit_rows_ = std::max({options_.sequences, options_.guesses + 1, std::min<int64_t>(options_.chunk, 32)});
    const int64_t whole = std::max<int64_t>(1, plan_.context);
    page_ = options_.page > 0 ? std::min(options_.page, whole) : whole;
    allocate(true);
  };
  if (c.experts > 0)
    options_.chunk = std::min<int64_t>(
        options_.chunk, std::max<int64_t>(1, 16384 / c.experts_per_token));  // this many choices are sorted in one go
  if (options_.context > 0) options_.chunk = std::min(options_.chunk, options_.context);
  plan_.free = device_.free_bytes(plan_.mapped);
  plan_.context = options_.context;
  plan();
  if (plan_.context == 0) {
    const size_t free = plan_.free / 20 * 19, fixed = plan_.total() + (device_.is_host() ? plan_.mapped : 0),
                 per_token = size_t(options_.sequences) * (key_bytes() + sizeof(int32_t));
    plan_.context = std::min(c.positions, free > fixed ? int64_t((free - fixed) / per_token) : 0);
    if (plan_.context > 0) options_.chunk = std::min(options_.chunk, plan_.context);
    plan();
  }
  if (c.learned_positions && plan_.context > c.positions)
    throw Error("--context: ", plan_.context, " is larger than the model's ", c.positions, " learned positions");
  if (options_.sinks >= plan_.context && plan_.context > 0)
    throw Error("--sinks: ", options_.sinks, " is not less than the context, ", plan_.context, " tokens");
  if (plan_.context >= 1 && plan_.total() <= device_.free_bytes()) return;
  const std::string mapped = plan_.mapped > 0 ? " (" + megabytes(plan_.mapped) + " memory-mapped)" : "",
                    texts = options_.sequences > 1 ? concat(options_.sequences, " x ") : "";
  throw Error("the model does not fit into memory: ", megabytes(plan_.weights + plan_.mapped), " weights", mapped, ", ",
              megabytes(plan_.cache), " KV cache (", texts, plan_.context, " tokens), ", megabytes(plan_.activations),
              " activations; ", megabytes(plan_.free), " free", helps());
}

// Names options that are not given yet and make the largest part of the plan smaller.
std::string Model::helps() const {
  const Config& c = config_;
  const size_t weights = plan_.weights + plan_.mapped, cache = std::max(plan_.cache, key_bytes());
  std::vector<std::string> all;
  if (weights >= std::max(cache, plan_.activations)) {
    const auto has = [&](Type type) { return device_.products(type) != nullptr; };
    const auto whole = [](int64_t cols) { return cols % kGroup == 0; };
    const int bits = options_.weights < 0 ? 16 : bits_of(Type(options_.weights));
    if (bits > 8 && has(Type::i8)) all.push_back("--weights int8");
    if (bits > 4 && has(Type::i4) && whole(c.hidden) && whole(c.heads * c.head_dim) && whole(c.inner) &&
        whole(c.expert_inner) && whole(c.shared_inner))
      all.push_back("--weights int4");
    if (plan_.mapped > 0 && options_.context == 0 && plan_.total() <= plan_.free)
      all.push_back("--context (weights are then read from disk at every step)");
  } else if (cache >= plan_.activations) {
    if (plan_.context > 1) all.push_back(options_.context > 0 ? "a smaller --context" : "--context");
    if (bits_of(cache_type_) > 8 && device_.attend(Type::i8) != nullptr) all.push_back("--cache int8");
    if (options_.sequences > 1) all.push_back("a smaller batch");
  } else {
    if (options_.chunk > 32) all.push_back("a smaller --chunk");
    if (options_.sequences > 1) all.push_back("a smaller batch");
  }
  return all.empty() ? "" : "; try " + listed(all, " or ");
}

// Makes the buffers, or with only_plan adds up their bytes.
void Model::allocate(bool only_plan) {
  const Config& c = config_;
  const int64_t nq = c.heads * c.head_dim, nk = c.kv_heads * c.head_dim, pages = (context() + page_ - 1) / page_,
                texts = options_.sequences, guesses = options_.guesses + 1, a = bits_of(device_.rows().activations) / 8;
  // Inner columns of a feed-forward layer; with experts, of all experts of a token together.
  const int64_t inside = std::max({c.inner, c.shared_inner, c.experts_per_token * c.expert_inner});
  // The bytes of a row of any product's inputs in 8 bits, with its scale.
  const int64_t codes = options_.inputs < 0 ? 0 : std::max({c.hidden, nq, inside}) + int64_t(sizeof(float));
  const auto make_of = [&](size_t& sum, auto& buffer, int64_t count, const char* what, bool shared = false) {
    sum += size_t(count) * sizeof(*buffer);
    if (!only_plan) buffer = std::decay_t<decltype(buffer)>(device_, count, what, shared);
  };
  const auto make = [&](auto& buffer, int64_t count, const char* what = "activations", bool shared = false) {
    make_of(plan_.activations, buffer, count, what, shared);
  };
  plan_.cache = plan_.activations = 0;
  for (Layer& layer : layers_) {
    const int64_t elements = texts * pages * page_ * nk, size = bits_of(cache_type_) / 8;
    for (auto* side : {&layer.keys, &layer.values}) make_of(plan_.cache, *side, elements * size, "the KV cache");
    if (cache_type_ != Type::i8) continue;
    for (auto* scales : {&layer.key_scales, &layer.value_scales})
      make_of(plan_.cache, *scales, elements / c.head_dim, "the KV cache");
  }
  make(table_, texts * pages);
  if (!only_plan) {
    std::vector<int32_t> table(table_.count());
    std::iota(table.begin(), table.end(), 0);
    table_.upload(table.data(), table.size());
  }
  for (auto* buffer : {&ids_, &positions_, &owners_}) make(*buffer, rows_);
  make(lengths_, 2);
  make(x_, rows_ * c.hidden), make(t_, rows_ * c.hidden), make(y_, rows_ * c.hidden * a);
  make(raw_, rows_ * (nq + 2 * nk));
  make(q_, rows_ * nq * a), make(o_, rows_ * nq * a), make(h_, rows_ * inside * a);
  make(logits_, logit_rows_ * c.vocabulary), make(chosen_, logit_rows_);
  for (auto* buffer : {&last_ids_, &last_positions_, &last_lengths_, &last_kept_}) make(*buffer, texts);
  make(seeds_, texts), make(steps_, texts), make(history_, texts * context());
  make(out_, kRing * texts, "tokens", true);
  texts_ = {last_ids_, last_positions_, last_lengths_, last_kept_,         chosen_, history_, seeds_, steps_, out_,
            texts,     context(),       kRing,         options_.sinks >= 0};
  decode_.resize(size_t(guesses));
  make(given_, guesses, "tokens", true), make(guessed_, 3 * guesses), make(guessed_seeds_, 2 * guesses);
  if (c.experts > 0) {
    const int64_t choices = rows_ * c.experts_per_token;
    for (auto* buffer : {&expert_ids_, &order_, &places_by_expert_}) make(*buffer, choices);
    make(offsets_, c.experts + 1), make(shares_, choices);
    make(router_logits_, rows_ * c.experts), make(made_, choices * c.hidden);
    experts_ = {c.experts, c.experts_per_token, c.shares_add_to_one, expert_ids_, offsets_,
                order_,    places_by_expert_,   router_logits_,      shares_};
  }
  make(room_, int64_t(workspace_bytes())), make(codes_, rows_ * codes, "codes of inputs");
  make(decoded_, int64_t(decoded_bytes()), "decoded weights");
  for (size_t i = 0; i < c.ropes.size(); ++i) {
    make(frequencies_[i], c.rotary_dim / 2);
    ropes_[i] = {frequencies_[i], c.rotary_dim, c.ropes[i].amplitude};
  }
  place_.wide = bits_of(layers_[0].qkv.q.type) >= 16;
  place_.room = decoded_, place_.room_bytes = decoded_.count();
}

// A step of one text is one launch (walk.cu) if a layer is norm, attention, norm and gated products, and nothing else.
void Model::plan_walk() {
  const Config& c = config_;
  const Matrix& w = layers_[0].up;
  const WalkCalls* const calls = device_.walk(w.type);
  if (calls == nullptr || options_.sequences != 1 || options_.batch_invariant || c.layer_norm || c.post_norms ||
      c.learned_positions || c.output_bias || c.experts > 0 || c.score_cap > 0 || c.logit_cap > 0)
    return;
  std::vector<WalkLayer> layers;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& l = layers_[i];
    const LayerConfig& how = c.layers[i];
    if (how.window > 0 && options_.sinks >= 0) return;
    for (const Matrix* m : {&l.qkv.q, &l.qkv.k, &l.qkv.v, &l.output, &l.gate, &l.up, &l.down}) {
      if (m->type != w.type) return;
    }
    layers.push_back({l.qkv, l.output, l.gate, l.up, l.down, l.attention_norm.gamma, l.mlp_norm.gamma, l.q_norm.gamma,
                      l.k_norm.gamma, l.keys, l.values, how.rope, how.window});
  }
  walk_ = {};
  walk_.count = int64_t(layers.size()), walk_.hidden = c.hidden, walk_.inner = c.inner, walk_.vocabulary = c.vocabulary,
  walk_.shape = c.shape(), walk_.cache = cache_type_, walk_.activation = c.activation, walk_.eps = c.eps,
  walk_.score_scale = c.score_scale, walk_.head_norms = c.head_norms;
  for (size_t i = 0; i < c.ropes.size(); ++i) walk_.ropes[i] = ropes_[i];
  walk_.embedding = embedding_, walk_.embedding_scale = c.embedding_scale;
  if (head_.type == w.type) walk_.head = head_;  // never quantized: beside quantized layers it is a call of its own
  walk_.last_norm = last_norm_.gamma, walk_.x = x_, walk_.logits = logits_;
  const size_t bytes = calls->bytes(walk_);
  if (bytes == 0) return;
  walk_layers_ = Buffer<WalkLayer>(device_, walk_.count, "layers");
  walk_layers_.upload(layers.data(), layers.size());
  walk_room_ = Buffer<char>(device_, int64_t(bytes), "activations");
  walk_.layers = walk_layers_, walk_.room = walk_room_;
  if (calls->begin(place_, walk_, layers.data()) != nullptr) return;  // the separate calls need no tensor maps
  walk_calls_ = calls;
}

}  // namespace llm
