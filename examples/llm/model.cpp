#include "model.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

namespace llm {

constexpr int64_t kRing = 64;  // tokens of a text that the host may be behind

// ---- the computation: a token's way through the layers --------------------------------------------------------------

// x = embedding; for each layer x += attention(norm(x)), x += feed_forward(norm(x)).
void Model::layers(const Tokens& tokens) {
  const RowCalls& rows = device_.rows();
  const Place& place = device_.place();
  const Heads shape = config_.shape();
  const int64_t n = tokens.rows(), hidden = config_.hidden;
  float *const x = x_.as<float>(), *const t = t_.as<float>();

  check(rows.embed(place, tokens, embedding_, config_.embedding_scale, places_, x));
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const LayerConfig& how = config_.layers[i];
    const Rope& rope = ropes_[how.rope];
    const int64_t sequence = tokens.owners != nullptr ? reading_ : 0;
    const Cache cache = cache_of(layer, sequence);

    // Queries, and keys and values behind those of the tokens before.
    const QkvWeights& w = layer.qkv;
    if (!config_.head_norms && products(w.q).makes(cache.type)) {
      check(products(w.q).qkv(place, tokens, shape, normed(x, layer.attention_norm, w.q, n), w, rope, cache, q_.as()));
    } else {
      check(products(w.q).three(place, normed(x, layer.attention_norm, w.q, n), w, raw_.as<float>(), n));
      check(rows.rotate(place, tokens, shape, raw_.as<float>(), layer.q_norm, layer.k_norm, rope, cache, q_.as()));
    }

    const Attend attend{shape, how.window, config_.score_scale, config_.score_cap};
    check(
        device_.attend(cache.type)->attend(place, tokens, attend, q_.as(), cache, o_.as(), room_.as(), room_.bytes()));
    if (config_.post_norms) {
      check(products(layer.output).plain(place, o_.as(), layer.output, layer.output_bias, t, n));
      check(rows.add_norm(place, t, layer.after_attention, x, n, hidden));
    } else {
      check(products(layer.output).residual(place, o_.as(), layer.output, layer.output_bias, x, n));
    }

    if (how.experts) {
      experts(layer, n);
      continue;
    }
    check(products(layer.up).up(place, config_.activation, normed(x, layer.mlp_norm, layer.up, n), layer.gate, layer.up,
                                layer.up_bias, h_.as(), n));
    if (config_.post_norms) {
      check(products(layer.down).plain(place, h_.as(), layer.down, layer.down_bias, t, n));
      check(rows.add_norm(place, t, layer.after_mlp, x, n, hidden));
    } else {
      check(products(layer.down).residual(place, h_.as(), layer.down, layer.down_bias, x, n));
    }
  }
}

// norm(x), or x as it is with the norm that the product with w applies itself.
Inputs Model::normed(const float* x, const Norm& norm, const Matrix& w, int64_t rows) {
  if (rows == 1 && !norm.layer_norm && products(w).folds) return {x, &norm};
  check(device_.rows().norm(device_.place(), x, norm, y_.as(), rows, config_.hidden));
  return {y_.as()};
}

// A router sends each row to a few experts; their products are made in groups. Qwen2 has one more expert that all rows
// go to.
void Model::experts(const Layer& layer, int64_t n) {
  const RowCalls& rows = device_.rows();
  const Place& place = device_.place();
  float* const x = x_.as<float>();
  check(rows.norm(place, x, layer.mlp_norm, y_.as(), n, config_.hidden));
  check(products(layer.router).plain(place, y_.as(), layer.router, zeros_, experts_.logits, n));
  check(rows.route(place, experts_, n));
  check(products(layer.expert_up).expert_up(place, experts_, y_.as(), layer.expert_gate, layer.expert_up, h_.as(), n));
  check(products(layer.expert_down)
            .expert_down(place, experts_, h_.as(), layer.expert_down, zeros_, made_.as<float>(), n));
  check(rows.combine(place, experts_, made_.as<float>(), x, n, config_.hidden));
  if (!layer.shared_gate) return;
  check(products(layer.up).up(place, config_.activation, {y_.as()}, layer.gate, layer.up, zeros_, h_.as(), n));
  check(products(layer.down).plain(place, h_.as(), layer.down, zeros_, t_.as<float>(), n));
  check(products(layer.shared_gate).plain(place, y_.as(), layer.shared_gate, zeros_, experts_.logits, n));
  check(rows.add_gated(place, experts_.logits, t_.as<float>(), x, n, config_.hidden));
}

// The logits of some of the rows of x.
void Model::head(int64_t first, int64_t rows) {
  const Place& place = device_.place();
  check(device_.rows().norm(place, x_.as<float>() + first * config_.hidden, last_norm_, y_.as(), rows, config_.hidden));
  check(products(head_).plain(place, y_.as(), head_, zeros_, logits_.as<float>(), rows));
  if (config_.logit_cap > 0)
    check(device_.rows().cap(place, logits_.as<float>(), config_.logit_cap, rows, config_.vocabulary));
}

// ---- steps ----------------------------------------------------------------------------------------------------------

void Model::read(int64_t text, int64_t from, const int32_t* ids, int64_t n) { read_rows(text, from, ids, n, nullptr); }
void Model::score(int64_t text, int64_t from, const int32_t* ids, int64_t n, const Each& each) {
  read_rows(text, from, ids, n, &each);
}

void Model::read_rows(int64_t text, int64_t from, const int32_t* ids, int64_t n, const Each* each) {
  if (text < 0 || text >= options_.sequences || from < 0 || n < 1 || from + n > context())
    throw Error("the text is longer than the context of " + std::to_string(context()) + " tokens");
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] < 0 || ids[i] >= config_.vocabulary)
      throw Error("the tokenizer makes the token " + std::to_string(ids[i]) + ", and the model has " +
                  std::to_string(config_.vocabulary));
  }
  set_length(from + n);
  reading_ = text;
  for (int64_t done = 0; done < n;) {
    const int64_t rows = std::min(options_.chunk, n - done);
    std::vector<int32_t> positions(static_cast<size_t>(rows)), owners(static_cast<size_t>(rows), 0);
    for (int64_t i = 0; i < rows; ++i) positions[size_t(i)] = int32_t(from + done + i);
    const int32_t length = int32_t(from + done + rows);
    ids_.upload(ids + done, size_t(rows) * 4);
    positions_.upload(positions.data(), size_t(rows) * 4);
    owners_.upload(owners.data(), size_t(rows) * 4);
    lengths_.upload(&length, 4);
    layers(
        {1, rows, ids_.as<int32_t>(), positions_.as<int32_t>(), owners_.as<int32_t>(), lengths_.as<int32_t>(), length});
    for (int64_t first = 0; each != nullptr && first < rows; first += logit_rows_) {
      const int64_t some = std::min(logit_rows_, rows - first);
      head(first, some);
      for (int64_t i = 0; i < some; ++i) (*each)(done + first + i, logits(i));
    }
    done += rows;
    if (done == n && each == nullptr) head(rows - 1, 1);
  }
}

void Model::begin(int64_t text, const std::vector<int32_t>& ids, const Choice& how, int64_t tokens, uint64_t seed) {
  const int32_t n = int32_t(ids.size()), last = n - 1;
  const uint64_t step = uint64_t(n);
  if (how.temperature != choice_.temperature || how.top_p != choice_.top_p || how.min_p != choice_.min_p ||
      how.repetition_penalty != choice_.repetition_penalty || how.top_k != choice_.top_k || tokens != tokens_) {
    for (auto& recording : decode_) recording = nullptr;  // they have the old ones in them
  }
  choice_ = how, tokens_ = tokens;
  history_.upload(ids.data(), ids.size() * 4, size_t(text * context()) * 4);
  last_ids_.upload(&ids.back(), 4, size_t(text) * 4);
  last_positions_.upload(&last, 4, size_t(text) * 4);
  last_lengths_.upload(&n, 4, size_t(text) * 4);
  last_kept_.upload(&n, 4, size_t(text) * 4);
  seeds_.upload(&seed, 8, size_t(text) * 8);
  steps_.upload(&step, 8, size_t(text) * 8);
}

Texts Model::texts() const {
  return {last_ids_.as<int32_t>(),
          last_positions_.as<int32_t>(),
          last_lengths_.as<int32_t>(),
          last_kept_.as<int32_t>(),
          chosen_.as<int32_t>(),
          history_.as<int32_t>(),
          seeds_.as<uint64_t>(),
          steps_.as<uint64_t>(),
          out_.as<uint64_t>(),
          options_.sequences,
          context(),
          kRing,
          options_.sinks >= 0};
}

void Model::choose(int64_t first, int64_t count) {
  check(device_.rows().choose(device_.place(), choice_, logits_.as<float>(), config_.vocabulary, tokens_, texts(),
                              first, count));
}

void Model::choose_next(int64_t text) { choose(text, 1); }

// Attention is told how long texts may be: a step is recorded anew when one is longer, for twice as long.
void Model::replay(int64_t guesses, int64_t longest, const std::function<void()>& calls) {
  set_length(longest);
  if (longest > recorded_for_) {
    device_.synchronize();
    for (auto& recording : decode_) recording = nullptr;
    recorded_for_ = 256;
    while (recorded_for_ < longest) recorded_for_ *= 2;
  }
  std::unique_ptr<Recording>& recording = decode_[size_t(guesses)];
  if (recording == nullptr) recording = device_.record(calls);
  recording->replay();
}

void Model::step(int64_t longest) {
  replay(0, longest, [this] {
    const int64_t n = options_.sequences;
    layers({n, 1, last_ids_.as<int32_t>(), last_positions_.as<int32_t>(), nullptr, last_lengths_.as<int32_t>(),
            recorded_for_, last_kept_.as<int32_t>()});
    head(0, n);
    choose(0, n);
  });
}

void Model::step(int64_t length, int32_t last, const std::vector<int32_t>& guesses) {
  if (guesses.empty()) return step(length);
  const int64_t n = int64_t(guesses.size()), rows = n + 1;
  if (n > options_.guesses || length + n > context()) throw Error("guesses do not fit");
  given_.as<int32_t>()[0] = last;
  std::copy(guesses.begin(), guesses.end(), given_.as<int32_t>() + 1);
  replay(n, length + n, [this, rows] {
    int32_t* const ids = guessed_.as<int32_t>();
    uint64_t* const seeds = guessed_seeds_.as<uint64_t>();
    const Guesses all{given_.as<int32_t>(), rows, ids, ids + rows, ids + 2 * rows, seeds, seeds + rows};
    check(device_.rows().guess(device_.place(), texts(), all));
    reading_ = 0;
    layers({1, rows, all.ids, all.positions, owners_.as<int32_t>(), all.lengths + rows - 1, recorded_for_});
    head(0, rows);
    check(device_.rows().verify(device_.place(), choice_, logits_.as<float>(), config_.vocabulary, tokens_, texts(),
                                all));
  });
}

int32_t Model::token(int64_t text, int64_t n) {
  const volatile uint64_t& place = out_.as<uint64_t>()[n % kRing * options_.sequences + text];
  for (uint64_t value; (value = place) >> 32 != uint64_t(n);) {
    if (device_.idle() && (value = place) >> 32 != uint64_t(n))
      throw Error("token " + std::to_string(n) + " was never chosen");
  }
  const int32_t id = int32_t(uint32_t(place));
  if (id < 0) throw Error("the logits of token " + std::to_string(n) + " are not numbers: the model has overflowed");
  return id;
}

const float* Model::logits(int64_t row) {
  host_logits_.resize(size_t(config_.vocabulary));
  device_.download(host_logits_.data(), logits_.as<float>() + row * config_.vocabulary, host_logits_.size() * 4);
  return host_logits_.data();
}

void Model::set_length(int64_t length) {
  for (size_t i = 0; i < config_.ropes.size(); ++i) {
    std::vector<float> f = config_.ropes[i].frequencies(config_.rotary_dim, length);
    if (f == frequencies_now_[i]) continue;
    if (!f.empty()) frequencies_[i].upload(f.data(), f.size() * 4);
    frequencies_now_[i] = std::move(f);
  }
}

bool Model::stale(int64_t from, int64_t to) const {
  return std::any_of(config_.ropes.begin(), config_.ropes.end(),
                     [&](const RopeConfig& rope) { return rope.differs(from, to); });
}

bool Model::lengths_matter() const {
  return std::any_of(config_.ropes.begin(), config_.ropes.end(),
                     [](const RopeConfig& rope) { return rope.type == "dynamic" || rope.type == "longrope"; });
}

Cache Model::cache_of(const Layer& layer, int64_t sequence) const {
  const int64_t pages = (context() + page_ - 1) / page_;
  return {cache_type_,
          layer.keys.as(),
          layer.values.as(),
          table_.as<int32_t>() + sequence * pages,
          pages,
          page_,
          layer.key_scales.as<float>(),
          layer.value_scales.as<float>(),
          options_.sinks < 0 ? 0 : context(),
          options_.sinks};
}

// ---- loading --------------------------------------------------------------------------------------------------------

// Finds, checks and brings to the device what the model reads. With only a plan to make it adds up bytes.
class Model::Loader {
 public:
  Loader(Model& model, const Weights& files, const Progress& progress, bool only_plan)
      : model_(model), files_(files), progress_(progress), only_plan_(only_plan), all_(double(files.bytes()) + 1) {}

  bool has(const std::string& name) const { return files_.has(name); }
  const Weights& files() const { return files_; }

  // rows x cols weights; in a transposed model cols x rows in the file. quantize: whether --weights of fewer than 16
  // bits are meant.
  Matrix matrix(const std::string& name, int64_t rows, int64_t cols, bool quantize = true, bool transposed = false) {
    const Tensor& tensor =
        files_.get(name, transposed ? std::vector<int64_t>{cols, rows} : std::vector<int64_t>{rows, cols});
    const int wanted = model_.options_.weights;
    const Type type = wanted < 0 || (!quantize && bits_of(Type(wanted)) < 16) ? tensor.type : Type(wanted);
    if (type == Type::i4 && cols % kGroup != 0)
      throw Error(name + ": rows of " + std::to_string(cols) + " weights are no whole groups of " +
                  std::to_string(kGroup) + ", which int4 needs");
    if (model_.device_.products(type) == nullptr)
      throw Error(std::string("weights of ") + name_of(type) + " are not compiled in for this device");
    Matrix out{nullptr, nullptr, rows, cols, type};
    const size_t bytes = llm::weight_bytes(type, rows, cols), scales = scale_bytes(type, rows, cols);
    model_.weights_per_token_ += bytes + scales, model_.weights_count_ += size_t(rows * cols);

    const bool as_it_is = type == tensor.type && !transposed;
    const bool aligned = reinterpret_cast<uintptr_t>(tensor.data) % size_t(bits_of(tensor.type) / 8) == 0;
    if (as_it_is && aligned && model_.device_.is_host()) {
      model_.plan_.mapped += bytes;
      out.data = tensor.data;
    } else {
      model_.plan_.weights += bytes + scales;
      out.data = out.scales = "";  // anything but null, in a plan
      if (!only_plan_) {
        if (as_it_is) {
          out.data = keep(tensor.data, bytes), out.scales = nullptr;
        } else {
          Converted result(bytes, scales);
          convert(tensor, 0, rows, transposed, out, 0, result);
          keep(out, result);
        }
      }
    }
    done(tensor.bytes);
    return out;
  }

  // Some rows of each of several tensors, one below the other: what experts need. `share`: of them that a token reads.
  struct Slice {
    const Tensor* tensor;
    int64_t first, rows;
  };
  Matrix joined(const std::string& name, const std::vector<Slice>& parts, int64_t cols, double share) {
    const Type stored = parts[0].tensor->type;
    const Type type = model_.options_.weights < 0 ? stored : Type(model_.options_.weights);
    if (type == Type::i4 && cols % kGroup != 0)
      throw Error(name + ": rows of " + std::to_string(cols) + " weights are no whole groups of " +
                  std::to_string(kGroup) + ", which int4 needs");
    if (model_.device_.products(type) == nullptr)
      throw Error(std::string("weights of ") + name_of(type) + " are not compiled in for this device");
    Matrix out{"", "", 0, cols, type};
    for (const Slice& part : parts) out.rows += part.rows;
    const size_t bytes = llm::weight_bytes(type, out.rows, cols), scales = scale_bytes(type, out.rows, cols);
    model_.weights_per_token_ += size_t(share * double(bytes + scales)),
        model_.weights_count_ += size_t(share * double(out.rows * cols));
    model_.plan_.weights += bytes + scales;
    if (only_plan_) return out;
    Converted result(bytes, scales);
    int64_t row = 0;
    for (const Slice& part : parts) {
      convert(*part.tensor, part.first, part.rows, false, out, row, result);
      row += part.rows;
      done(size_t(part.rows * cols) * size_t(bits_of(part.tensor->type) / 8));
    }
    keep(out, result);
    return out;
  }

  // Floats on the device, each plus something.
  const float* vector(const std::string& name, int64_t n, float plus = 0) {
    const Tensor& tensor = files_.get(name, {n});
    std::vector<float> values(static_cast<size_t>(n));
    to_floats(tensor.type, tensor.data, values.data(), n);
    for (float& value : values) value += plus;
    done(tensor.bytes);
    return floats(values);
  }
  const float* floats(const std::vector<float>& values) {
    model_.plan_.weights += values.size() * 4;
    return only_plan_ ? &nothing_ : static_cast<const float*>(keep(values.data(), values.size() * 4));
  }

 private:
  void done(size_t bytes) {
    done_ += double(bytes);
    if (progress_ && !only_plan_) progress_(std::min(1.0, done_ / all_));
  }
  const void* keep(const void* from, size_t bytes) {
    model_.memory_.emplace_back(model_.device_, bytes, "weights");
    model_.memory_.back().upload(from, bytes);
    return model_.memory_.back().as();
  }
  // Weights of another type than the file's, on their way to the device.
  struct Converted {
    std::vector<unsigned char> data, scales;
    Converted(size_t bytes, size_t scale_bytes) : data(bytes), scales(scale_bytes) {}
  };
  // Rows of a tensor from `first` on become those from `to` on: some at a time in each thread, so that no second copy
  // of a large matrix is needed in floats.
  void convert(const Tensor& tensor, int64_t first, int64_t rows, bool transposed, const Matrix& out, int64_t to,
               Converted& result) const {
    const int64_t size = bits_of(tensor.type) / 8, cols = out.cols,
                  some = std::max<int64_t>(1, (int64_t(1) << 18) / std::max<int64_t>(1, cols));
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      std::vector<float> values(size_t(some * cols));
      for (int64_t row; (row = next.fetch_add(some)) < rows;) {
        const int64_t n = std::min(some, rows - row);
        if (!transposed) {
          to_floats(tensor.type, tensor.data + (first + row) * cols * size, values.data(), n * cols);
        } else {
          for (int64_t col = 0; col < cols; ++col) {
            for (int64_t i = 0; i < n; ++i)
              to_floats(tensor.type, tensor.data + (col * out.rows + first + row + i) * size,
                        &values[size_t(i * cols + col)], 1);
          }
        }
        from_floats(values.data(), n, cols, out.type, result.data.data() + llm::weight_bytes(out.type, to + row, cols),
                    result.scales.data() + scale_bytes(out.type, to + row, cols));
      }
    };
    std::vector<std::thread> others;
    const int64_t most = std::min<int64_t>(model_.device_.place().threads, (rows + some - 1) / some);
    for (int64_t i = 1; i < most; ++i) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
  }
  void keep(Matrix& out, const Converted& result) {
    out.data = keep(result.data.data(), result.data.size());
    out.scales = result.scales.empty() ? nullptr : keep(result.scales.data(), result.scales.size());
  }

  Model& model_;
  const Weights& files_;
  const Progress& progress_;
  bool only_plan_;
  double all_, done_ = 0;
  float nothing_ = 0;
};

namespace {

// Some rows of a matrix.
Matrix rows_of(const Matrix& all, int64_t first, int64_t rows) {
  Matrix out = all;
  out.rows = rows;
  out.data = static_cast<const char*>(all.data) + weight_bytes(all.type, first, all.cols);
  if (all.scales != nullptr) out.scales = static_cast<const char*>(all.scales) + scale_bytes(all.type, first, all.cols);
  return out;
}

}  // namespace

// Columns inside of a feed-forward layer, of all experts of a token together.
int64_t Model::inside() const {
  return std::max({config_.inner, config_.shared_inner, config_.experts_per_token * config_.expert_inner});
}

void Model::load(Loader& loader) {
  const Config& c = config_;
  const int64_t nq = c.heads * c.head_dim, nk = c.kv_heads * c.head_dim;
  const bool gpt2 = c.learned_positions;
  const float plus = c.norm_plus_one ? 1.f : 0.f;
  zeros_ = loader.floats(
      std::vector<float>(size_t(std::max({c.vocabulary, c.hidden, c.inner, nq, c.experts, c.shared_inner})), 0.f));
  const auto norm = [&](const std::string& name, int64_t n) {
    return Norm{loader.vector(name + ".weight", n, plus), c.layer_norm ? loader.vector(name + ".bias", n) : nullptr,
                c.eps, c.layer_norm};
  };
  const auto bias = [&](bool there, const std::string& name, int64_t n) {
    return there ? loader.vector(name + ".bias", n) : zeros_;
  };

  // Where the layers stand.
  const std::string table = gpt2 ? "wte.weight" : "embed_tokens.weight";
  std::string prefix = gpt2 ? "transformer." : "model.";
  for (const char* other : {"", "transformer.", "model.", "language_model.model.", "model.language_model."}) {
    if (loader.has(other + table)) prefix = other;
  }
  embedding_ = loader.matrix(prefix + table, c.vocabulary, c.hidden, false);
  if (gpt2) places_ = loader.matrix(prefix + "wpe.weight", c.positions, c.hidden, false);
  if (!c.tied)
    weights_per_token_ = weights_count_ = 0;  // the table is read a row at a time, unless it is the head as well

  for (size_t i = 0; i < c.layers.size(); ++i) {
    Layer& l = layers_[i];
    if (gpt2) {
      const std::string at = prefix + "h." + std::to_string(i) + ".";
      l.attention_norm = norm(at + "ln_1", c.hidden);
      l.mlp_norm = norm(at + "ln_2", c.hidden);
      const Matrix all = loader.matrix(at + "attn.c_attn.weight", nq + 2 * nk, c.hidden, true, true);
      const float* const biases = loader.vector(at + "attn.c_attn.bias", nq + 2 * nk);
      l.qkv = {rows_of(all, 0, nq), rows_of(all, nq, nk), rows_of(all, nq + nk, nk), biases,
               biases + nq,         biases + nq + nk};
      l.output = loader.matrix(at + "attn.c_proj.weight", c.hidden, nq, true, true);
      l.output_bias = loader.vector(at + "attn.c_proj.bias", c.hidden);
      l.up = loader.matrix(at + "mlp.c_fc.weight", c.inner, c.hidden, true, true);
      l.up_bias = loader.vector(at + "mlp.c_fc.bias", c.inner);
      l.down = loader.matrix(at + "mlp.c_proj.weight", c.hidden, c.inner, true, true);
      l.down_bias = loader.vector(at + "mlp.c_proj.bias", c.hidden);
      for (const char* mask : {"attn.bias", "attn.masked_bias"}) loader.files().ignore(at + mask);
      continue;
    }
    const std::string at = prefix + "layers." + std::to_string(i) + ".", attention = at + "self_attn.",
                      mlp = at + "mlp.";
    l.attention_norm = norm(at + "input_layernorm", c.hidden);
    if (c.post_norms) {
      l.after_attention = norm(at + "post_attention_layernorm", c.hidden);
      l.mlp_norm = norm(at + "pre_feedforward_layernorm", c.hidden);
      l.after_mlp = norm(at + "post_feedforward_layernorm", c.hidden);
    } else {
      l.mlp_norm = norm(at + "post_attention_layernorm", c.hidden);
    }
    if (c.head_norms)
      l.q_norm = norm(attention + "q_norm", c.head_dim), l.k_norm = norm(attention + "k_norm", c.head_dim);
    l.output_bias = bias(c.output_bias, attention + "o_proj", c.hidden);
    l.up_bias = l.down_bias = zeros_;
    if (c.layers[i].experts) {
      // Mixtral has names of its own; transformers 5 may write one tensor for all experts.
      const bool mixtral = loader.has(at + "block_sparse_moe.gate.weight");
      const std::string base = mixtral ? at + "block_sparse_moe." : mlp, all = base + "experts.";
      const double share = double(c.experts_per_token) / double(c.experts);
      l.router = loader.matrix(base + "gate.weight", c.experts, c.hidden, false);
      std::vector<Loader::Slice> gate, up, down;
      const bool fused = loader.has(all + "gate_up_proj");
      const Tensor* const both =
          fused ? &loader.files().get(all + "gate_up_proj", {c.experts, 2 * c.expert_inner, c.hidden}) : nullptr;
      const Tensor* const last =
          fused ? &loader.files().get(all + "down_proj", {c.experts, c.hidden, c.expert_inner}) : nullptr;
      for (int64_t e = 0; e < c.experts; ++e) {
        const std::string one = all + std::to_string(e) + ".";
        const auto part = [&](const char* name, int64_t rows, int64_t cols) {
          return Loader::Slice{&loader.files().get(one + name + ".weight", {rows, cols}), 0, rows};
        };
        gate.push_back(fused ? Loader::Slice{both, e * 2 * c.expert_inner, c.expert_inner}
                             : part(mixtral ? "w1" : "gate_proj", c.expert_inner, c.hidden));
        up.push_back(fused ? Loader::Slice{both, (2 * e + 1) * c.expert_inner, c.expert_inner}
                           : part(mixtral ? "w3" : "up_proj", c.expert_inner, c.hidden));
        down.push_back(fused ? Loader::Slice{last, e * c.hidden, c.hidden}
                             : part(mixtral ? "w2" : "down_proj", c.hidden, c.expert_inner));
      }
      l.expert_gate = loader.joined(all, gate, c.hidden, share), l.expert_up = loader.joined(all, up, c.hidden, share);
      l.expert_down = loader.joined(all, down, c.expert_inner, share);
      if (c.shared_inner > 0) {
        l.shared_gate = loader.matrix(mlp + "shared_expert_gate.weight", 1, c.hidden, false);
        l.gate = loader.matrix(mlp + "shared_expert.gate_proj.weight", c.shared_inner, c.hidden);
        l.up = loader.matrix(mlp + "shared_expert.up_proj.weight", c.shared_inner, c.hidden);
        l.down = loader.matrix(mlp + "shared_expert.down_proj.weight", c.hidden, c.shared_inner);
      }
    }
    if (c.fused) {
      const Matrix all = loader.matrix(attention + "qkv_proj.weight", nq + 2 * nk, c.hidden);
      l.qkv = {rows_of(all, 0, nq), rows_of(all, nq, nk), rows_of(all, nq + nk, nk), zeros_, zeros_, zeros_};
      const Matrix both = loader.matrix(mlp + "gate_up_proj.weight", 2 * c.inner, c.hidden);
      l.gate = rows_of(both, 0, c.inner), l.up = rows_of(both, c.inner, c.inner);
    } else {
      const auto part = [&](const char* name, int64_t rows) {
        return loader.matrix(attention + name + ".weight", rows, c.hidden);
      };
      const auto part_bias = [&](const char* name, int64_t rows) { return bias(c.qkv_bias, attention + name, rows); };
      l.qkv = {part("q_proj", nq),      part("k_proj", nk),      part("v_proj", nk),
               part_bias("q_proj", nq), part_bias("k_proj", nk), part_bias("v_proj", nk)};
      if (c.mlp_bias) throw Error("config.json: mlp_bias: true is not supported");
      if (!c.layers[i].experts)
        l.gate = loader.matrix(mlp + "gate_proj.weight", c.inner, c.hidden),
        l.up = loader.matrix(mlp + "up_proj.weight", c.inner, c.hidden);
    }
    l.output = loader.matrix(attention + "o_proj.weight", c.hidden, nq);
    if (!c.layers[i].experts) l.down = loader.matrix(mlp + "down_proj.weight", c.hidden, c.inner);
    loader.files().ignore(attention + "rotary_emb.inv_freq");
  }
  last_norm_ = norm(prefix + (gpt2 ? "ln_f" : "norm"), c.hidden);
  loader.files().ignore(prefix + "rotary_emb.inv_freq");
  // The flag decides: a tied model may have a head in its files, which is not read.
  if (c.tied) {
    head_ = embedding_;
    for (const char* name : {"lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight"})
      loader.files().ignore(name);
  } else {
    head_ = loader.matrix(prefix.rfind("language_model.", 0) == 0 ? "language_model.lm_head.weight" : "lm_head.weight",
                          c.vocabulary, c.hidden, false);
  }
  for (const auto& item : loader.files().all()) {
    if (item.first.rfind("vision_tower.", 0) == 0 || item.first.rfind("model.vision_tower.", 0) == 0 ||
        item.first.rfind("multi_modal_projector.", 0) == 0 ||
        item.first.rfind("model.multi_modal_projector.", 0) == 0) {
      loader.files().ignore(item.first);
    }
  }
  if (const std::string name = loader.files().unread(); !name.empty())
    throw Error("the tensor " + shown(name) + " belongs to nothing that this architecture (" + c.architecture +
                ") has");
}

Model::Model(const Config& config, const Weights& files, Device& device, const ModelOptions& options,
             const Progress& progress, bool only_plan)
    : config_(config), device_(device), options_(options) {
  const Config& c = config_;
  if (options_.sequences < 1 || options_.sequences > 4096)
    throw Error("the number of sequences is not between 1 and 4096");
  if (options_.chunk < 0 || options_.chunk > 1 << 20) throw Error("--chunk is not between 0 and 2^20");
  if (options_.chunk == 0) options_.chunk = device_.chunk();
  if (options_.sinks >= 0) {
    if (c.learned_positions)
      throw Error("--sinks: the positions of this model are learned, and there are no more than " +
                  std::to_string(c.positions));
    if (lengths_matter())
      throw Error(
          "--sinks: the angles of this model depend on the length of the text, and keys that are gone cannot be made anew");
  }
  if (options_.guesses < 0 || options_.guesses >= kRing)
    throw Error("--lookup is not between 0 and " + std::to_string(kRing - 1));
  if (options_.guesses > 0 && options_.sequences > 1) throw Error("--lookup is for one text at a time");
  if (options_.guesses > 0 && options_.sinks >= 0)
    throw Error(
        "--lookup and --sinks exclude each other: a wrong guess would take the place of a key that is still seen");
  layers_.resize(c.layers.size());
  Loader loader(*this, files, progress, true);
  load(loader);

  cache_type_ = options_.cache >= 0 ? Type(options_.cache) : embedding_.type == Type::f32 ? Type::f32 : embedding_.type;
  if (options_.cache < 0 && device_.attend(cache_type_) == nullptr) cache_type_ = Type::f16;
  if (device_.attend(cache_type_) == nullptr)
    throw Error(std::string("keys and values of ") + name_of(cache_type_) + " are not compiled in for this device");
  const size_t a = size_t(bits_of(device_.rows().activations) / 8),
               per_token = key_bytes() * size_t(options_.sequences);
  const auto plan_activations = [&] {
    rows_ = std::max({options_.chunk, options_.sequences, options_.guesses + 1});
    logit_rows_ = std::max({options_.sequences, options_.guesses + 1, std::min<int64_t>(options_.chunk, 32)});
    const int64_t nq = c.heads * c.head_dim, nk = c.kv_heads * c.head_dim;
    plan_.activations =
        size_t(rows_) * (size_t(2 * c.hidden + nq + 2 * nk) * 4 + size_t(c.hidden + 2 * nq + inside()) * a +
                         size_t(c.experts_per_token * (c.hidden + 4) + c.experts) * 4 + 16) +
        size_t(logit_rows_ * c.vocabulary) * 4;
  };
  if (c.experts > 0)
    options_.chunk = std::min<int64_t>(
        options_.chunk, std::max<int64_t>(1, 16384 / c.experts_per_token));  // as many choices as are sorted in one go
  if (options_.context > 0) options_.chunk = std::min(options_.chunk, options_.context);
  plan_activations();
  const size_t free = device_.free_bytes() / 20 * 19,
               fixed = plan_.weights + plan_.activations + (device_.is_host() ? plan_.mapped : 0);
  plan_.context = options_.context;
  if (plan_.context == 0) {
    const int64_t room = free > fixed ? int64_t((free - fixed) / per_token) : 0;
    plan_.context = std::min(c.positions, room);
    options_.chunk = std::min(options_.chunk, std::max<int64_t>(1, plan_.context));
    plan_activations();
  }
  if (c.learned_positions && plan_.context > c.positions)
    throw Error("--context: this model has no more than " + std::to_string(c.positions) + " positions");
  if (options_.sinks >= plan_.context && plan_.context > 0)
    throw Error("--sinks: the context of " + std::to_string(plan_.context) + " tokens is not larger");
  page_ = options_.page > 0 ? std::min(options_.page, std::max<int64_t>(1, plan_.context))
                            : std::max<int64_t>(1, plan_.context);
  plan_.cache = size_t((plan_.context + page_ - 1) / page_ * page_) * per_token;
  const auto megabytes = [](size_t bytes) { return std::to_string((bytes + 999999) / 1000000) + " MB"; };
  if (plan_.context < 1 || (plan_.total() > device_.free_bytes())) {
    throw Error("the model does not fit: " + megabytes(plan_.weights) + " of weights, " + megabytes(plan_.cache) +
                " of keys and values for " + std::to_string(plan_.context) + " tokens and " +
                megabytes(plan_.activations) + " of activations, and " + megabytes(device_.free_bytes()) +
                " are free; a smaller --context, --cache fp8 or --weights int8 take less");
  }
  if (only_plan) return;
  plan_.mapped = plan_.weights = weights_per_token_ = weights_count_ = 0;
  Loader again(*this, files, progress, false);
  load(again);
  allocate();
}

Model::Model(const Config& config, const Weights& files, Device& device, const ModelOptions& options,
             const Progress& progress)
    : Model(config, files, device, options, progress, false) {}

Plan Model::plan(const Config& config, const Weights& files, Device& device, const ModelOptions& options) {
  return Model(config, files, device, options, {}, true).plan_;
}

void Model::allocate() {
  const Config& c = config_;
  const int64_t nq = c.heads * c.head_dim, nk = c.kv_heads * c.head_dim, pages = (context() + page_ - 1) / page_;
  const size_t a = size_t(bits_of(device_.rows().activations) / 8);
  const auto make = [&](Buffer& buffer, int64_t elements, size_t size, const char* what = "activations") {
    buffer = Buffer(device_, size_t(elements) * size, what);
  };
  for (Layer& layer : layers_) {
    const int64_t elements = options_.sequences * pages * page_ * nk;
    make(layer.keys, elements, size_t(bits_of(cache_type_) / 8), "keys");
    make(layer.values, elements, size_t(bits_of(cache_type_) / 8), "values");
    if (cache_type_ != Type::i8) continue;
    make(layer.key_scales, elements / c.head_dim, 4, "keys");
    make(layer.value_scales, elements / c.head_dim, 4, "values");
  }
  std::vector<int32_t> table(static_cast<size_t>(options_.sequences * pages));
  for (size_t i = 0; i < table.size(); ++i) table[i] = int32_t(i);
  make(table_, int64_t(table.size()), 4);
  table_.upload(table.data(), table.size() * 4);
  for (Buffer* buffer : {&ids_, &positions_, &owners_, &lengths_}) make(*buffer, rows_, 4);
  make(x_, rows_ * c.hidden, 4), make(t_, rows_ * c.hidden, 4), make(y_, rows_ * c.hidden, a);
  make(raw_, rows_ * (nq + 2 * nk), 4);
  make(q_, rows_ * nq, a), make(o_, rows_ * nq, a), make(h_, rows_ * inside(), a);
  make(logits_, logit_rows_ * c.vocabulary, 4);
  for (Buffer* buffer : {&last_ids_, &last_positions_, &last_lengths_, &last_kept_})
    make(*buffer, options_.sequences, 4);
  make(chosen_, logit_rows_, 4);
  decode_.resize(size_t(options_.guesses + 1));
  given_ = Buffer(device_, decode_.size() * 4, "tokens", true);
  make(guessed_, 3 * int64_t(decode_.size()), 4), make(guessed_seeds_, 2 * int64_t(decode_.size()), 8);
  for (Buffer* buffer : {&seeds_, &steps_}) make(*buffer, options_.sequences, 8);
  make(history_, options_.sequences * context(), 4);
  out_ = Buffer(device_, size_t(kRing * options_.sequences) * 8, "tokens", true);
  if (c.experts > 0) {
    const int64_t choices = rows_ * c.experts_per_token;
    for (Buffer* buffer : {&expert_ids_, &order_, &places_by_expert_, &shares_}) make(*buffer, choices, 4);
    make(offsets_, c.experts + 1, 4), make(router_logits_, rows_ * c.experts, 4), make(made_, choices * c.hidden, 4);
    experts_ = {c.experts,
                c.experts_per_token,
                c.shares_add_to_one,
                expert_ids_.as<int32_t>(),
                offsets_.as<int32_t>(),
                order_.as<int32_t>(),
                places_by_expert_.as<int32_t>(),
                router_logits_.as<float>(),
                shares_.as<float>()};
  }
  size_t room = 0;
  for (int64_t each = 1; each <= kChunkQueries; ++each)
    room = std::max(room, device_.attend(cache_type_)->bytes(device_.place(), {1, each}, c.shape()));
  room = std::max(room, device_.attend(cache_type_)->bytes(device_.place(), {options_.sequences, 1}, c.shape()));
  room_ = Buffer(device_, room, "activations");
  for (size_t i = 0; i < c.ropes.size(); ++i) {
    make(frequencies_[i], std::max(1, c.rotary_dim / 2), 4);
    ropes_[i] = {frequencies_[i].as<float>(), c.rotary_dim, c.ropes[i].amplitude};
  }
}

}  // namespace llm
