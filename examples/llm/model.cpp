#include "model.h"

#include <algorithm>
#include <cstring>

namespace llm {

// ---- the computation: a token's way through the layers --------------------------------------------------------------

// x = embedding; for each layer x += attention(norm(x)), x += feed_forward(norm(x)).
void Model::layers(const Tokens& tokens, const Progress& progress) {
  const RowCalls& rows = device_.rows();
  const Heads shape = config_.shape();
  const int64_t n = tokens.rows();
  // x += a product, or in Gemma 2 and 3 the norm of a product.
  const auto add = [&](const Buffer<char>& y, const Matrix& w, const float* bias, const Norm& after) {
    const Inputs inputs = encoded({y}, w, n);
    if (!config_.post_norms) return check(products(w).residual(place_, inputs, w, bias, x_, n));
    check(products(w).plain(place_, inputs, w, bias, t_, n));
    check(rows.add_norm(place_, t_, after, x_, n, config_.hidden));
  };

  check(rows.embed(place_, tokens, embedding_, config_.embedding_scale, places_, x_));
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (progress) progress(double(i) / double(layers_.size()));
    const Layer& layer = layers_[i];
    const LayerConfig& how = config_.layers[i];
    const Rope& rope = ropes_[how.rope];
    const Cache cache = cache_of(layer);

    // Queries to q_, and keys and values to the cache.
    const QkvWeights& w = layer.qkv;
    if (!config_.head_norms && products(w.q).makes(cache.type)) {
      check(products(w.q).qkv(place_, tokens, shape, normed(layer.attention_norm, w.q, n), w, rope, cache, q_));
    } else {
      check(products(w.q).three(place_, normed(layer.attention_norm, w.q, n), w, raw_, n));
      check(rows.rotate(place_, tokens, shape, raw_, layer.q_norm, layer.k_norm, rope, cache, q_));
    }

    const Attend attend{shape, how.window, config_.score_scale, config_.score_cap};
    check(device_.attend(cache.type)->attend(place_, tokens, attend, q_, cache, o_, room_, room_.count()));
    add(o_, layer.output, layer.output_bias, layer.after_attention);

    if (how.experts) {
      experts(layer, n);
      continue;
    }
    check(products(layer.up).up(place_, config_.activation, normed(layer.mlp_norm, layer.up, n), layer.gate, layer.up,
                                layer.up_bias, h_, n));
    add(h_, layer.down, layer.down_bias, layer.after_mlp);
  }
}

// norm(x); or x and the norm, which the product with w then applies itself.
Inputs Model::normed(const Norm& norm, const Matrix& w, int64_t rows) {
  if (!norm.layer_norm && in_codes(w, rows)) return encoded({x_, &norm}, w, rows);
  if (rows == 1 && !norm.layer_norm && products(w).folds && !options_.batch_invariant) return {x_, &norm};
  check(device_.rows().norm(place_, x_, norm, y_, rows, config_.hidden));
  return encoded({y_}, w, rows);
}

// The inputs of the product with w, quantized to 8 bits if --inputs asks for it and there are many rows.
Inputs Model::encoded(const Inputs& y, const Matrix& w, int64_t rows) {
  if (!in_codes(w, rows)) return y;
  float* const scales = reinterpret_cast<float*>(codes_ + rows * w.cols);  // after the codes
  check(device_.rows().encode(place_, y, w.type, codes_, scales, rows, w.cols));
  return {codes_, nullptr, scales};
}

// A router sends each row to a few experts, whose products are grouped. Qwen2 adds a shared expert for all rows.
void Model::experts(const Layer& layer, int64_t n) {
  const RowCalls& rows = device_.rows();
  check(rows.norm(place_, x_, layer.mlp_norm, y_, n, config_.hidden));
  check(products(layer.router).plain(place_, {y_}, layer.router, zeros_, experts_.logits, n));
  check(rows.route(place_, experts_, n));
  check(products(layer.expert_up).expert_up(place_, experts_, y_, layer.expert_gate, layer.expert_up, h_, n));
  check(products(layer.expert_down).expert_down(place_, experts_, h_, layer.expert_down, zeros_, made_, n));
  check(rows.combine(place_, experts_, made_, x_, n, config_.hidden));
  if (!layer.shared_gate) return;
  const Inputs y = encoded({y_}, layer.up, n);
  check(products(layer.up).up(place_, config_.activation, y, layer.gate, layer.up, zeros_, h_, n));
  const Inputs h = encoded({h_}, layer.down, n);
  check(products(layer.down).plain(place_, h, layer.down, zeros_, t_, n));
  check(products(layer.shared_gate).plain(place_, {y_}, layer.shared_gate, zeros_, experts_.logits, n));
  check(rows.add_gated(place_, experts_.logits, t_, x_, n, config_.hidden));
}

// The logits of rows [first, first + rows) of x.
void Model::head(int64_t first, int64_t rows) {
  check(device_.rows().norm(place_, x_ + first * config_.hidden, last_norm_, y_, rows, config_.hidden));
  check(products(head_).plain(place_, {y_}, head_, zeros_, logits_, rows));
  if (config_.logit_cap > 0) check(device_.rows().cap(place_, logits_, config_.logit_cap, rows, config_.vocabulary));
}

// ---- steps ----------------------------------------------------------------------------------------------------------

void Model::check_text(int64_t text, int64_t from, int64_t n) const {
  if (text < 0 || text >= options_.sequences) throw Error("no sequence ", text, " in a batch of ", options_.sequences);
  if (from < 0 || (options_.sinks < 0 && (n > context() || from > context() - n)))
    throw Error("a sequence of ", from + n, " tokens exceeds the context of ", context());
}

// Chunked prefill. In a ring a new key replaces one that earlier tokens of the same chunk may still see, so tokens
// beyond the context are read one by one.
void Model::read(int64_t text, int64_t from, const int32_t* ids, int64_t n, const Progress& progress,
                 const Each& each) {
  if (n < 1) throw Error("no tokens to compute");
  check_text(text, from, n);
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] < 0 || ids[i] >= config_.vocabulary)
      throw Error("the tokenizer's token ", ids[i], " is not below vocab_size in config.json, ", config_.vocabulary);
  }
  set_length(from + n);
  text_ = text;
  for (int64_t done = 0; done < n;) {
    const int64_t left = context() - (from + done), rows = left > 0 ? std::min({options_.chunk, n - done, left}) : 1;
    std::vector<int32_t> positions(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) positions[size_t(i)] = int32_t(from + done + i);
    const int32_t length = int32_t(from + done + rows);
    const int32_t lengths[] = {length, int32_t(std::min<int64_t>(length, context()))};
    ids_.upload(ids + done, size_t(rows));
    positions_.upload(positions.data(), size_t(rows));
    lengths_.upload(lengths, 2);
    const Progress of_all = [&](double share) { progress((double(done) + share * double(rows)) / double(n)); };
    layers({1, rows, ids_, positions_, owners_, lengths_, length, lengths_ + 1}, progress ? of_all : Progress());
    for (int64_t first = 0; each && first < rows; first += logit_rows_) {
      const int64_t some = std::min(logit_rows_, rows - first);
      head(first, some);
      for (int64_t i = 0; i < some; ++i) each(done + first + i, logits(i));
    }
    done += rows;
    if (done == n && !each) head(rows - 1, 1);
  }
}

double Model::multiplications(int64_t tokens) const {
  const auto size = [](const Matrix& w) { return double(w.rows) * double(w.cols); };
  // If embedding and head are tied, weights_count_ includes the table of learned positions, which is only added.
  const double layers = double(weights_count_) - size(head_) - (config_.tied ? size(places_) : 0);
  return double(tokens) * layers + size(head_);
}

void Model::begin(int64_t text, const std::vector<int32_t>& ids, const Choice& how, int64_t tokens, uint64_t seed) {
  if (ids.empty()) throw Error("a prompt of no tokens cannot be continued");
  check_text(text, 0, int64_t(ids.size()));
  const int32_t n = int32_t(ids.size()), last = n - 1, kept = int32_t(std::min<int64_t>(n, context()));
  const uint64_t step = uint64_t(n);
  if (std::memcmp(&how, &choice_, sizeof(how)) != 0 || tokens != tokens_)
    decode_.assign(decode_.size(), nullptr);  // captured steps have the old options in them
  choice_ = how, tokens_ = tokens;
  std::vector<int32_t> history(static_cast<size_t>(kept));  // the last ones
  for (size_t i = ids.size() - history.size(); i < ids.size(); ++i) history[i % history.size()] = ids[i];
  const size_t at = size_t(text);
  history_.upload(history.data(), history.size(), at * size_t(context()));
  last_ids_.upload(&ids.back(), 1, at), last_positions_.upload(&last, 1, at);
  last_lengths_.upload(&n, 1, at), last_kept_.upload(&kept, 1, at);
  seeds_.upload(&seed, 1, at), steps_.upload(&step, 1, at);
}

void Model::choose_next(int64_t text, int64_t texts) {
  check(device_.rows().choose(place_, choice_, logits_, config_.vocabulary, tokens_, texts_, text, texts));
}

// A captured step is for texts up to some length, which attention plans with. When a text is longer, steps are captured
// again, for twice the length.
void Model::replay(int64_t guesses, int64_t longest, const std::function<void()>& calls) {
  set_length(longest);
  if (longest > recorded_for_) {
    device_.synchronize();
    decode_.assign(decode_.size(), nullptr);
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
    text_ = 0;
    const Tokens tokens{n, 1, last_ids_, last_positions_, nullptr, last_lengths_, recorded_for_, last_kept_};
    // All layers in one launch, usually with the head, or call by call.
    if (walks()) check(walk_calls_->walk(place_, walk_, tokens, cache_of(layers_[0])));
    else layers(tokens);
    if (!walks() || !walk_.head) head(0, n);
    choose_next(0, n);
  });
}

void Model::step(int64_t length, int32_t last, const std::vector<int32_t>& guesses) {
  if (guesses.empty()) return step(length);
  const int64_t n = int64_t(guesses.size()), rows = n + 1;
  if (n > options_.guesses || length + n > context()) throw Error(n, " draft tokens exceed --lookup or the context");
  given_[0] = float(last);  // exact: below 2^22
  std::copy(guesses.begin(), guesses.end(), given_ + 1);
  replay(n, length + n, [this, rows] {
    const Guesses all{
        given_, rows, guessed_, guessed_ + rows, guessed_ + 2 * rows, guessed_seeds_, guessed_seeds_ + rows};
    check(device_.rows().guess(place_, texts_, all));
    text_ = 0;
    layers({1, rows, all.ids, all.positions, owners_, all.lengths + rows - 1, recorded_for_});
    head(0, rows);
    check(device_.rows().verify(place_, choice_, logits_, config_.vocabulary, tokens_, texts_, all));
  });
}

int32_t Model::token(int64_t text, int64_t n) {
  const volatile uint64_t& place = out_[n % kRing * options_.sequences + text];
  for (uint64_t value; (value = place) >> 32 != uint64_t(n);) {
    if (device_.idle() && (value = place) >> 32 != uint64_t(n)) throw Error("token ", n, " was never sampled");
  }
  const int32_t id = int32_t(uint32_t(place));
  if (id < 0) throw Error("the logits of token ", n, " are not finite: the model has overflowed");
  return id;
}

const float* Model::logits(int64_t row) {
  host_logits_.resize(size_t(config_.vocabulary));
  logits_.download(host_logits_.data(), host_logits_.size(), size_t(row) * host_logits_.size());
  return host_logits_.data();
}

void Model::set_length(int64_t length) {
  for (size_t i = 0; i < config_.ropes.size(); ++i) {
    std::vector<float> f = config_.ropes[i].frequencies(config_.rotary_dim, length);
    if (f == frequencies_now_[i]) continue;
    frequencies_[i].upload(f.data(), f.size());
    frequencies_now_[i] = std::move(f);
  }
}

Cache Model::cache_of(const Layer& layer) const {
  const int64_t pages = (context() + page_ - 1) / page_, ring = options_.sinks < 0 ? 0 : context();
  const int32_t* const table = table_ + text_ * pages;
  return {cache_type_, layer.keys,       layer.values,       table, pages,
          page_,       layer.key_scales, layer.value_scales, ring,  options_.sinks};
}

}  // namespace llm
