// Attention over keys and values of one type, kCaches[0]. Included by cpu.cpp and gpu.cu.

namespace {

k::AttentionShape shape_of(const Tokens& tokens, const Heads& heads) { return {tokens.sequences, tokens.each, heads.heads, heads.kv_heads, heads.dim}; }

// Few queries of each sequence share the keys out among all threads or blocks; many are shared out themselves; on the GPU a chunk of a prompt that
// is too short for that leaves parts of the keys in a workspace.
bool is_decode(const Tokens& tokens) { return tokens.each <= kFewQueries; }
bool is_chunk(const Tokens& tokens) { return kSplitsChunks && tokens.each <= kChunkQueries; }

// How keys are shared out. Where no text may depend on others, into parts that depend on neither their number nor the longest one.
k::Attention keys_of(const Place& place, const Tokens& tokens) {
  return place.invariant && is_decode(tokens) ? k::Attention{}.splits(kInvariantParts) : k::Attention{}.most_keys(tokens.longest);
}

size_t attend_bytes(const Place& place, const Tokens& tokens, const Heads& heads) {
  const k::AttentionShape shape = shape_of(tokens, heads);
  const k::Attention options = keys_of(place, tokens);
  if (is_decode(tokens)) return decode_bytes(place, shape, options);
  return is_chunk(tokens) ? chunk_bytes(place, shape, options) : 0;
}

// The window of one query in a ring. Where the keys of a text that is longer than the ring lie is not their place in the text.
struct WindowInRing : k::Score {
  const int32_t* lengths;  // of the texts, not of what the ring holds
  uint32_t window, ring, sinks;
  k::SoftCap cap;
  WindowInRing(const Tokens& tokens, const Cache& cache, const Attend& how)
      : lengths(tokens.lengths), window(uint32_t(how.window)), ring(uint32_t(cache.ring)), sinks(uint32_t(cache.sinks)), cap(how.cap) {}

  template <int N>
  KERNELS_HD k::Pack<float, N> transform(const k::Pack<float, N>& logits, const k::ScoreAt& at) const {
    return cap.cap > 0 ? cap.transform(logits, at) : logits;
  }
  KERNELS_HD bool visible(const k::ScoreAt& at) const {
    const uint32_t last = uint32_t(lengths[at.batch]) - 1, key = uint32_t(at.key), around = ring - sinks;
    const uint32_t place = key < sinks ? key : key + (last - key) / around * around;
    return last - place < window;
  }
};

const char* attend(const Place& place, const Tokens& tokens, const Attend& how, const void* q, const Cache& cache, void* o, void* room, size_t bytes) {
  const int64_t cols = how.shape.heads * how.shape.dim;
  const auto queries = k::load(static_cast<const A*>(q), cols);
  const auto out = k::store(static_cast<A*>(o), cols);
  auto options = keys_of(place, tokens).scale(how.scale);
  // In a ring new keys lie among the old ones. Lengths are written before the step. Where texts are guessed on, its first kernel writes them, and has
  // ended: a product of several rows lets attention begin only when all ahead of that product have.
  if (cache.ring == 0) options.new_keys(tokens.each);
  const k::Window mask = k::window(how.window > 0 ? how.window - 1 : -1, 0);
  const k::AttentionShape shape = shape_of(tokens, how.shape);
  return with_cache(cache, how.shape, tokens, [&](const auto& kv) {
    const auto decode = [&](const auto& score) { return reason(on::decode(for_attention(place, tokens.rows()), queries, kv, out, shape, score, k::Workspace{room, bytes}, options)); };
    if (tokens.each == 1 && how.window > 0 && cache.ring > 0) return decode(WindowInRing(tokens, cache, how));
    const auto with = [&](const auto& score) {
      if (is_decode(tokens)) return decode(score);
      if constexpr (kSplitsChunks) {
        if (is_chunk(tokens)) return reason(on::attention(for_attention(place, tokens.rows()), queries, kv, out, shape, score, k::Workspace{room, bytes}, options));
      }
      return reason(on::attention(for_attention(place, tokens.rows()), queries, kv, out, shape, score, options));
    };
    return how.cap > 0 ? with(mask & k::soft_cap(how.cap)) : with(mask);
  });
}

}  // namespace
