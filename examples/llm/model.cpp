#include "model.h"

#include <algorithm>
#include <cstring>

namespace llm {

// ---- the computation: a token's way through the layers --------------------------------------------------------------

// x = embedding; for each layer x += attention(norm(x)), x += feed_forward(norm(x)).
void Model::layers(const Tokens& tokens, const Progress& progress) {
  const RowCalls& rows = device_.rows();
  const Place place = this->place();
  const Heads shape = config_.shape();
  const int64_t n = tokens.rows(), hidden = config_.hidden;
  float *const x = x_.as<float>(), *const t = t_.as<float>();
  // x += a product, or, in Gemma 2 and 3, its norm.
  const auto add = [&](const Buffer& y, const Matrix& w, const float* bias, const Norm& after) {
    const Inputs inputs = encoded({y.as()}, w, n);
    if (!config_.post_norms) return check(products(w).residual(place, inputs, w, bias, x, n));
    check(products(w).plain(place, inputs, w, bias, t, n));
    check(rows.add_norm(place, t, after, x, n, hidden));
  };

  check(rows.embed(place, tokens, embedding_, config_.embedding_scale, places_, x));
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (progress) progress(double(i) / double(layers_.size()));
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
    add(o_, layer.output, layer.output_bias, layer.after_attention);

    if (how.experts) {
      experts(layer, n);
      continue;
    }
    check(products(layer.up).up(place, config_.activation, normed(x, layer.mlp_norm, layer.up, n), layer.gate, layer.up,
                                layer.up_bias, h_.as(), n));
    add(h_, layer.down, layer.down_bias, layer.after_mlp);
  }
}

// The same, and the head, for one token in one launch.
void Model::walk(const Tokens& tokens) {
  check(walk_calls_->walk(device_.place(), walk_, tokens, cache_of(layers_[0], 0)));
  if (!walk_.head) head(0, 1);
}

// norm(x), or x as it is with the norm that the product with w applies itself.
Inputs Model::normed(const float* x, const Norm& norm, const Matrix& w, int64_t rows) {
  if (!norm.layer_norm && in_codes(w, rows)) return encoded({x, &norm}, w, rows);
  if (rows == 1 && !norm.layer_norm && products(w).folds && !options_.batch_invariant) return {x, &norm};
  check(device_.rows().norm(place(), x, norm, y_.as(), rows, config_.hidden));
  return encoded({y_.as()}, w, rows);
}

// The same inputs of the product with w, as codes of 8 bits if --inputs asks for them and there are many rows.
Inputs Model::encoded(const Inputs& y, const Matrix& w, int64_t rows) {
  if (!in_codes(w, rows)) return y;
  float* const scales = reinterpret_cast<float*>(codes_.as<char>() + rows * w.cols);  // behind the codes
  check(device_.rows().encode(place(), y, w.type, codes_.as(), scales, rows, w.cols));
  return {codes_.as(), nullptr, scales};
}

// A router sends each row to a few experts; their products are made in groups. Qwen2 has one more expert that all rows
// go to.
void Model::experts(const Layer& layer, int64_t n) {
  const RowCalls& rows = device_.rows();
  const Place place = this->place();
  float* const x = x_.as<float>();
  check(rows.norm(place, x, layer.mlp_norm, y_.as(), n, config_.hidden));
  check(products(layer.router).plain(place, {y_.as()}, layer.router, zeros_, experts_.logits, n));
  check(rows.route(place, experts_, n));
  check(products(layer.expert_up).expert_up(place, experts_, y_.as(), layer.expert_gate, layer.expert_up, h_.as(), n));
  check(products(layer.expert_down)
            .expert_down(place, experts_, h_.as(), layer.expert_down, zeros_, made_.as<float>(), n));
  check(rows.combine(place, experts_, made_.as<float>(), x, n, config_.hidden));
  if (!layer.shared_gate) return;
  const Inputs y = encoded({y_.as()}, layer.up, n);
  check(products(layer.up).up(place, config_.activation, y, layer.gate, layer.up, zeros_, h_.as(), n));
  const Inputs h = encoded({h_.as()}, layer.down, n);
  check(products(layer.down).plain(place, h, layer.down, zeros_, t_.as<float>(), n));
  check(products(layer.shared_gate).plain(place, {y_.as()}, layer.shared_gate, zeros_, experts_.logits, n));
  check(rows.add_gated(place, experts_.logits, t_.as<float>(), x, n, config_.hidden));
}

// The logits of some of the rows of x.
void Model::head(int64_t first, int64_t rows) {
  const Place place = this->place();
  check(device_.rows().norm(place, x_.as<float>() + first * config_.hidden, last_norm_, y_.as(), rows, config_.hidden));
  check(products(head_).plain(place, {y_.as()}, head_, zeros_, logits_.as<float>(), rows));
  if (config_.logit_cap > 0)
    check(device_.rows().cap(place, logits_.as<float>(), config_.logit_cap, rows, config_.vocabulary));
}

// ---- steps ----------------------------------------------------------------------------------------------------------

void Model::read(int64_t text, int64_t from, const int32_t* ids, int64_t n, const Progress& progress) {
  read_rows(text, from, ids, n, nullptr, progress);
}
void Model::score(int64_t text, int64_t from, const int32_t* ids, int64_t n, const Each& each) {
  read_rows(text, from, ids, n, &each, {});
}

void Model::check_text(int64_t text, int64_t from, int64_t n) const {
  if (text < 0 || text >= options_.sequences)
    throw Error("there is no text " + std::to_string(text) + " of " + std::to_string(options_.sequences));
  if (from < 0 || (options_.sinks < 0 && (n > context() || from > context() - n)))
    throw Error("a text of " + std::to_string(from + n) + " tokens is longer than the context, which is " +
                std::to_string(context()));
}

// In a ring a new key takes the place of one that the tokens ahead of it may still see: behind the context they are
// read one by one.
void Model::read_rows(int64_t text, int64_t from, const int32_t* ids, int64_t n, const Each* each,
                      const Progress& progress) {
  if (n < 1) throw Error("there is no token to read");
  check_text(text, from, n);
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] < 0 || ids[i] >= config_.vocabulary)
      throw Error("the tokenizer makes the token " + std::to_string(ids[i]) + ", and the model has " +
                  std::to_string(config_.vocabulary));
  }
  set_length(from + n);
  reading_ = text;
  for (int64_t done = 0; done < n;) {
    const int64_t left = context() - (from + done), rows = left > 0 ? std::min({options_.chunk, n - done, left}) : 1;
    std::vector<int32_t> positions(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) positions[size_t(i)] = int32_t(from + done + i);
    const int32_t length = int32_t(from + done + rows);
    const int32_t lengths[] = {length, int32_t(std::min<int64_t>(length, context()))};
    ids_.upload(ids + done, size_t(rows) * 4);
    positions_.upload(positions.data(), size_t(rows) * 4);
    lengths_.upload(lengths, sizeof(lengths));
    const Progress of_all = [&](double share) { progress((double(done) + share * double(rows)) / double(n)); };
    layers(
        {1, rows, ids_.as<int32_t>(), positions_.as<int32_t>(), owners_.as<int32_t>(), lengths_.as<int32_t>(), length,
         lengths_.as<int32_t>() + 1},
        progress ? of_all : Progress());
    for (int64_t first = 0; each != nullptr && first < rows; first += logit_rows_) {
      const int64_t some = std::min(logit_rows_, rows - first);
      head(first, some);
      for (int64_t i = 0; i < some; ++i) (*each)(done + first + i, logits(i));
    }
    done += rows;
    if (done == n && each == nullptr) head(rows - 1, 1);
  }
}

double Model::multiplications(int64_t tokens) const {
  const auto size = [](const Matrix& w) { return double(w.rows) * double(w.cols); };
  // A table that is the head as well is counted together with that of learned positions, which are only added.
  const double layers = double(weights_count_) - size(head_) - (config_.tied ? size(places_) : 0);
  return double(tokens) * layers + size(head_);
}

void Model::begin(int64_t text, const std::vector<int32_t>& ids, const Choice& how, int64_t tokens, uint64_t seed) {
  if (ids.empty()) throw Error("a text of no tokens has nothing to go on from");
  check_text(text, 0, int64_t(ids.size()));
  const int32_t n = int32_t(ids.size()), last = n - 1, kept = int32_t(std::min<int64_t>(n, context()));
  const uint64_t step = uint64_t(n);
  if (how.temperature != choice_.temperature || how.top_p != choice_.top_p || how.min_p != choice_.min_p ||
      how.repetition_penalty != choice_.repetition_penalty || how.top_k != choice_.top_k || tokens != tokens_) {
    for (auto& recording : decode_) recording = nullptr;  // they have the old ones in them
  }
  choice_ = how, tokens_ = tokens;
  std::vector<int32_t> history(static_cast<size_t>(kept));  // the last ones
  for (size_t i = ids.size() - history.size(); i < ids.size(); ++i) history[i % history.size()] = ids[i];
  history_.upload(history.data(), history.size() * 4, size_t(text * context()) * 4);
  last_ids_.upload(&ids.back(), 4, size_t(text) * 4);
  last_positions_.upload(&last, 4, size_t(text) * 4);
  last_lengths_.upload(&n, 4, size_t(text) * 4);
  last_kept_.upload(&kept, 4, size_t(text) * 4);
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
  std::function<void()>& recorded = decode_[size_t(guesses)];
  if (!recorded) recorded = device_.record(calls);
  recorded();
}

void Model::step(int64_t longest) {
  if (options_.sinks < 0) check_text(0, 0, longest);
  replay(0, longest, [this] {
    const int64_t n = options_.sequences;
    const Tokens tokens{n, 1, last_ids_.as<int32_t>(), last_positions_.as<int32_t>(), nullptr,
                        last_lengths_.as<int32_t>(), recorded_for_, last_kept_.as<int32_t>()};
    if (walk_calls_ != nullptr) {
      walk(tokens);
    } else {
      layers(tokens);
      head(0, n);
    }
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
  logits_.download(host_logits_.data(), host_logits_.size() * 4, size_t(row) * host_logits_.size() * 4);
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

bool Model::lengths_matter() const { return config_.lengths_matter(); }

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

}  // namespace llm
