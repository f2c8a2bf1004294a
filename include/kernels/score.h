// Scores: operations on the logits of attention, between the product with the keys and the softmax: masks, soft cap,
// biases.
//
//   k::causal() & k::window(4095, 0) & k::soft_cap(30.f)
//   k::no_mask()
//
// no_mask()                                every query sees every key
// causal(align)                            a query sees the keys up to its own place
// window(left, right, align)               keys from `left` before its place up to `right` after it; -1: no limit
// bitmask(words, query_stride, batch_stride)     key j if bit j % 32 of word j / 32 is set; .head_stride(n): a mask for
//                                                each head
// tree_mask(words, query_stride, batch_stride)   a bitmask for the last q_len keys; all earlier keys are visible
// soft_cap(cap)                            cap * tanh(logit / cap), accurate to 2^-22 of the cap
// alibi(slopes)                            - slopes[head] * |place of the query - key|
// score_bias(p, batch_stride, head_stride, query_stride)   + p[...]; -inf masks a key; a stride of 0 repeats
// sinks(p)                                 attention sinks: one more logit for each head, p[head], without a value
//
// a & b masks what either masks; logits pass through a first. They are already scaled. The place of query i is key i +
// kv_len - q_len, so that the last query is at the last key (bottom_right, the default), or key i (top_left).
//
// A score of your own derives from k::Score and has any of
//
//   template <int N> KERNELS_HD k::Pack<float, N> transform(k::Pack<float, N> logits, const k::ScoreAt& at) const;
//       for keys at.key to at.key + N - 1, all of them below at.kv_len
//   KERNELS_HD bool visible(const k::ScoreAt& at) const;
//   KERNELS_HD uint32_t visible_keys(const k::ScoreAt& at) const;
//       the same for 32 keys: bit i is key at.key + i. Keys from at.kv_len on, which may even be the first, get bits of
//       any value, and no memory may be read for them. Only together with visible(). For kernels with many
//       queries, which then read a mask of bits once for 32 keys
//   KERNELS_HD k::KeyRange kv_range(const k::ScoreQueries& q) const;
//       keys outside the range are invisible to all of these queries, and are not read
//   KERNELS_HD float sink(int64_t head) const;
//   Status check(const AttentionShape& shape) const;
//
// A member with one of these names but another signature does not compile; ignoring it would silently mask nothing.
//
// For a single query, all keys in kv_range() are visible except those that visible() denies.
#pragma once

#include <tuple>

#include "core/attention_call.h"
#include "functor.h"

KERNELS_BEGIN

struct Score : Functor {};
struct KvView;

// The position of a logit: a query and a key of a sequence, both counted from its beginning.
struct ScoreAt {
  int64_t batch, head, query, key, q_len, kv_len;
};
// Queries [first, last] of a sequence.
struct ScoreQueries {
  int64_t batch, first, last, q_len, kv_len;
};
// Keys [begin, end).
struct KeyRange {
  int64_t begin, end;
};

enum class Align { bottom_right, top_left };

namespace detail {
KERNELS_HD int64_t place_of(int64_t query, int64_t q_len, int64_t kv_len, Align align) {
  return align == Align::bottom_right ? query + kv_len - q_len : query;
}
}  // namespace detail

// ---- masks ---------------------------------------------------------------------------------------------------------

struct NoMask : Score {};
inline NoMask no_mask() { return {}; }

struct Window : Score {
  int64_t left, right;
  Align align;
  Window(int64_t l, int64_t r, Align a) : left(lesser(l, kAll)), right(lesser(r, kAll)), align(a) {}

  KERNELS_HD KeyRange kv_range(const ScoreQueries& q) const {
    return {left < 0 ? 0 : detail::place_of(q.first, q.q_len, q.kv_len, align) - left,
            right < 0 ? q.kv_len : detail::place_of(q.last, q.q_len, q.kv_len, align) + right + 1};
  }
  Status check(const AttentionShape&) const {
    return left < -1 || right < -1 ? invalid("window: left or right is less than -1") : Status{};
  }

 private:
  // More than the distance from any query to any key, and small enough to be added to a position without overflow.
  static constexpr int64_t kAll = int64_t(1) << 32;
};
inline Window window(int64_t left, int64_t right, Align align = Align::bottom_right) { return {left, right, align}; }
// Not the map of the same name, which masks rows of scores in memory.
inline Window causal(Align align = Align::bottom_right) { return {-1, 0, align}; }

class Bitmask : public Score {
 public:
  Bitmask(const uint32_t* words, int64_t query_stride, int64_t batch_stride, bool last_keys)
      : words_(words), query_stride_(query_stride), batch_stride_(batch_stride), last_keys_(last_keys) {}

  KERNELS_HD bool visible(const ScoreAt& at) const {
    const int64_t bit = last_keys_ ? at.key - (at.kv_len - at.q_len) : at.key;
    return bit < 0 ||
           (words_[at.batch * batch_stride_ + at.head * head_stride_ + at.query * query_stride_ + bit / 32] >>
                (bit % 32) &
            1u) != 0;
  }
  KERNELS_HD uint32_t visible_keys(const ScoreAt& at) const {
    const int64_t ahead = last_keys_ ? at.kv_len - at.q_len : 0, bit = at.key - ahead, last = at.kv_len - ahead - 1;
    if (bit > last || bit <= -32) return 0xffffffffu;
    const uint32_t* const row = words_ + at.batch * batch_stride_ + at.head * head_stride_ + at.query * query_stride_;
    const int64_t word = bit >> 5;
    const int within = int(bit & 31);
    const uint32_t low = word < 0 ? 0xffffffffu : row[word];
    // There may be no word after that of the last key.
    const uint32_t high = within > 0 && (word + 1) * 32 <= last ? row[word + 1] : 0xffffffffu;
    return uint32_t((uint64_t(high) << 32 | low) >> within);
  }
  // Words between the masks of two heads; by default 0: all heads share one mask.
  Bitmask head_stride(int64_t stride) const { Bitmask out = *this; out.head_stride_ = stride; return out; }
  Status check(const AttentionShape&) const {
    KERNELS_TRY(detail::check_pointer(words_, "bitmask: the pointer is null",
                                      "bitmask: the pointer is not aligned for words of 32 bits"));
    return query_stride_ < 0 || batch_stride_ < 0 || head_stride_ < 0 ? invalid("bitmask: a stride is negative")
                                                                      : Status{};
  }

 private:
  const uint32_t* words_;
  int64_t query_stride_, batch_stride_, head_stride_ = 0;
  bool last_keys_;
};
// Strides count words; with a batch_stride of 0 all sequences share one mask.
inline Bitmask bitmask(const uint32_t* words, int64_t query_stride, int64_t batch_stride) {
  return {words, query_stride, batch_stride, false};
}
// For a tree of drafted tokens, whose keys are the last q_len keys of the sequence.
inline Bitmask tree_mask(const uint32_t* words, int64_t query_stride, int64_t batch_stride) {
  return {words, query_stride, batch_stride, true};
}

// ---- logits --------------------------------------------------------------------------------------------------------

struct SoftCap : Score {
  float cap, inverse;
  explicit SoftCap(float limit) : cap(limit), inverse(1.f / limit) {}

  template <int N>
  KERNELS_HD Pack<float, N> transform(const Pack<float, N>& logits, const ScoreAt&) const {
    return kernels::transform(logits, [this](float x) { return cap * fast_tanh(x * inverse); });
  }
  Status check(const AttentionShape&) const {
    return cap > 0 && inverse > 0 && cap < infinity<float>() ? Status{}
                                                             : invalid("soft_cap: the cap is not a positive number");
  }
};
inline SoftCap soft_cap(float cap) { return SoftCap(cap); }

struct Alibi : Score {
  const float* slopes;
  explicit Alibi(const float* p) : slopes(p) {}

  template <int N>
  KERNELS_HD Pack<float, N> transform(Pack<float, N> logits, const ScoreAt& at) const {
    const float slope = -slopes[at.head];
    const int distance = int(at.key - detail::place_of(at.query, at.q_len, at.kv_len, Align::bottom_right));
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) logits.v[i] = fma(slope, magnitude(float(distance + i)), logits.v[i]);
    return logits;
  }
  Status check(const AttentionShape&) const {
    return detail::check_pointer(slopes, "alibi: the pointer is null", "alibi: the pointer is not aligned for floats");
  }
};
inline Alibi alibi(const float* slopes) { return Alibi(slopes); }

// A query's biases are contiguous along its keys.
template <class T>
class ScoreBias : public Score {
 public:
  ScoreBias(const T* p, int64_t batch_stride, int64_t head_stride, int64_t query_stride)
      : p_(p), batch_stride_(batch_stride), head_stride_(head_stride), query_stride_(query_stride) {}

  template <int N>
  KERNELS_HD Pack<float, N> transform(Pack<float, N> logits, const ScoreAt& at) const {
    const T* from = p_ + at.batch * batch_stride_ + at.head * head_stride_ + at.query * query_stride_ + at.key;
#if defined(KERNELS_DEVICE_CODE)
    // The alignment is unknown. Deciding it here for each pack would keep several loads from being in flight together.
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) logits.v[i] = logits.v[i] + convert<float>(from[i]);
    return logits;
#else
    return logits + convert<float>(read<N, Cache::keep>(from).unpack());
#endif
  }
  // Whether the biases of keys key and key + 1, and of every pair an even number of keys further on, can be loaded in
  // one access. Then transform_pairs() does the same as transform() for packs of two keys.
  KERNELS_HD bool has_pairs(int64_t key) const {
    return (int64_t(reinterpret_cast<uintptr_t>(p_) / sizeof(T)) | batch_stride_ | head_stride_ | query_stride_ | key) %
               2 ==
           0;
  }
  template <int N>
  KERNELS_HD Pack<float, N> transform_pairs(const Pack<float, N>& logits, const ScoreAt& at) const {
    const T* from = p_ + at.batch * batch_stride_ + at.head * head_stride_ + at.query * query_stride_ + at.key;
    return logits + convert<float>(read<N, Cache::keep>(from).unpack());
  }
  Status check(const AttentionShape&) const {
    KERNELS_TRY(detail::check_pointer(p_, "score_bias: the pointer is null",
                                      "score_bias: the pointer is not aligned for its elements"));
    return batch_stride_ < 0 || head_stride_ < 0 || query_stride_ < 0 ? invalid("score_bias: a stride is negative")
                                                                      : Status{};
  }

 private:
  const T* p_;
  int64_t batch_stride_, head_stride_, query_stride_;
};
template <class T>
ScoreBias<T> score_bias(const T* p, int64_t batch_stride, int64_t head_stride, int64_t query_stride) {
  return {p, batch_stride, head_stride, query_stride};
}

template <class T>
struct Sinks : Score {
  const T* logits;
  explicit Sinks(const T* p) : logits(p) {}
  KERNELS_HD float sink(int64_t head) const { return convert<float>(logits[head]); }
  Status check(const AttentionShape&) const {
    return detail::check_pointer(logits, "sinks: the pointer is null",
                                 "sinks: the pointer is not aligned for its elements");
  }
};
template <class T>
Sinks<T> sinks(const T* p) { return Sinks<T>(p); }

// ---- composition, and how engines ask ------------------------------------------------------------------------------

template <class A, class B>
struct ScorePair : Score {
  A first;
  B second;
  ScorePair(A a, B b) : first(a), second(b) {}

  Status check(const AttentionShape& shape) const {
    if constexpr (detail::has_score_check<A>::value) KERNELS_TRY(first.check(shape));
    if constexpr (detail::has_score_check<B>::value) KERNELS_TRY(second.check(shape));
    return {};
  }
};

template <class A, class B,
          class = std::enable_if_t<std::is_base_of<Score, A>::value || std::is_base_of<Score, B>::value>>
auto operator&(A a, B b) {
  constexpr bool scores = std::is_base_of<Score, A>::value && std::is_base_of<Score, B>::value;
  static_assert(scores, "& composes scores (score.h), and one of these is none: k::causal() & k::soft_cap(30)");
  if constexpr (scores) return ScorePair<A, B>(a, b);
  else return no_mask();
}

namespace detail {

template <class S>
struct is_score_pair : std::false_type {};
template <class A, class B>
struct is_score_pair<ScorePair<A, B>> : std::true_type {};

KERNELS_NAME_OF_FUNCTION(transform)
KERNELS_NAME_OF_FUNCTION(visible)
KERNELS_NAME_OF_FUNCTION(visible_keys)
KERNELS_NAME_OF_FUNCTION(kv_range)
KERNELS_NAME_OF_FUNCTION(sink)
KERNELS_OPTIONAL(
    Transforms, transform,
    std::declval<const F&>().template transform<1>(std::declval<Pack<float, 1>>(), std::declval<ScoreAt>()),
    "template <int N> KERNELS_HD k::Pack<float, N> transform(k::Pack<float, N> logits, const k::ScoreAt& at) const")
KERNELS_DETECT(HasPairs, std::declval<const F&>().has_pairs(kAny))
KERNELS_OPTIONAL(Masks, visible, std::declval<const F&>().visible(std::declval<ScoreAt>()),
                 "KERNELS_HD bool visible(const k::ScoreAt& at) const")
KERNELS_OPTIONAL(MasksRuns, visible_keys, std::declval<const F&>().visible_keys(std::declval<ScoreAt>()),
                 "KERNELS_HD uint32_t visible_keys(const k::ScoreAt& at) const")
KERNELS_OPTIONAL(Ranges, kv_range, std::declval<const F&>().kv_range(std::declval<ScoreQueries>()),
                 "KERNELS_HD k::KeyRange kv_range(const k::ScoreQueries& q) const")
KERNELS_OPTIONAL(HasSink, sink, std::declval<const F&>().sink(kAny), "KERNELS_HD float sink(int64_t head) const")
template <class A, class B>
struct Transforms<ScorePair<A, B>, false> {
  static constexpr bool value = Transforms<A>::value || Transforms<B>::value;
};
template <class A, class B>
struct HasPairs<ScorePair<A, B>> {
  static constexpr bool value = HasPairs<A>::value || HasPairs<B>::value;
};
template <class A, class B>
struct Masks<ScorePair<A, B>, false> {
  static constexpr bool value = Masks<A>::value || Masks<B>::value;
};
template <class A, class B>
struct MasksRuns<ScorePair<A, B>, false> {
  static constexpr bool value = MasksRuns<A>::value || MasksRuns<B>::value;
};
template <class A, class B>
struct Ranges<ScorePair<A, B>, false> {
  static constexpr bool value = Ranges<A>::value || Ranges<B>::value;
};
template <class A, class B>
struct HasSink<ScorePair<A, B>, false> {
  static constexpr bool value = HasSink<A>::value || HasSink<B>::value;
};

// Whether a score changes logits, masks keys one by one, limits the range of keys, adds a sink.
template <class S>
constexpr bool score_transforms = Transforms<S>::value;
template <class S>
constexpr bool score_masks = Masks<S>::value;
template <class S>
constexpr bool score_masks_runs = MasksRuns<S>::value;
template <class S>
constexpr bool score_ranges = Ranges<S>::value;
template <class S>
constexpr bool score_sinks = HasSink<S>::value;

// kPairs: pairs_at() returned true.
template <bool kPairs = false, class S, int N>
KERNELS_HD Pack<float, N> transform_logits(const S& score, const Pack<float, N>& logits, const ScoreAt& at) {
  if constexpr (is_score_pair<S>::value)
    return transform_logits<kPairs>(score.second, transform_logits<kPairs>(score.first, logits, at), at);
  else if constexpr (kPairs && HasPairs<S>::value)
    return score.template transform_pairs<N>(logits, at);
  else if constexpr (Transforms<S>::value) return score.template transform<N>(logits, at);
  else return logits;
}
template <class S>
KERNELS_HD bool pairs_at(const S& score, int64_t key) {
  if constexpr (is_score_pair<S>::value)
    return pairs_at(score.first, key) && pairs_at(score.second, key);
  else if constexpr (HasPairs<S>::value)
    return score.has_pairs(key);
  else
    return true;
}
template <class S>
KERNELS_HD bool key_visible(const S& score, const ScoreAt& at) {
  if constexpr (is_score_pair<S>::value) return key_visible(score.first, at) && key_visible(score.second, at);
  else if constexpr (Masks<S>::value) return score.visible(at);
  else return true;
}
// visible() for 32 keys at once; a score without visible_keys() masks none here.
template <class S>
KERNELS_HD uint32_t keys_visible(const S& score, const ScoreAt& at) {
  if constexpr (is_score_pair<S>::value)
    return keys_visible(score.first, at) & keys_visible(score.second, at);
  else if constexpr (MasksRuns<S>::value)
    return score.visible_keys(at);
  else
    return 0xffffffffu;
}
// Whether some part of a score has visible() but no visible_keys().
template <class S>
constexpr bool score_masks_singly = Masks<S>::value && !MasksRuns<S>::value;
template <class A, class B>
constexpr bool score_masks_singly<ScorePair<A, B>> = score_masks_singly<A> || score_masks_singly<B>;
template <class S>
KERNELS_HD bool key_visible_singly(const S& score, const ScoreAt& at) {
  if constexpr (is_score_pair<S>::value)
    return key_visible_singly(score.first, at) && key_visible_singly(score.second, at);
  else if constexpr (score_masks_singly<S>)
    return score.visible(at);
  else
    return true;
}
// Within [0, kv_len], so that engines may count in 32 bits, and never with an end before the beginning: an empty range
// that a score returns may begin anywhere.
template <class S>
KERNELS_HD KeyRange key_range(const S& score, const ScoreQueries& q) {
  KeyRange r{0, q.kv_len};
  if constexpr (is_score_pair<S>::value) {
    const KeyRange a = key_range(score.first, q), b = key_range(score.second, q);
    r = {greater(a.begin, b.begin), lesser(a.end, b.end)};
  } else if constexpr (Ranges<S>::value) {
    r = score.kv_range(q);
    r = {lesser(greater<int64_t>(r.begin, 0), q.kv_len), lesser(r.end, q.kv_len)};
  }
  return {r.begin, greater(r.begin, r.end)};
}
// Whether later queries see about as many keys as earlier ones, or far more, if there are as many keys as queries.
// Scores of the user's own are not asked on the host, as their kv_range() may read device memory.
enum class KeysOfLater { alike, more, unknown };
template <class S>
KeysOfLater keys_of_later(const S& score, int64_t q_len) {
  if constexpr (is_score_pair<S>::value) {
    const KeysOfLater a = keys_of_later(score.first, q_len), b = keys_of_later(score.second, q_len);
    return greater(a, b);
  } else if constexpr (std::is_same<S, Window>::value) {
    const auto seen = [&](int64_t query) {
      const KeyRange range = key_range(score, {0, query, query, q_len, q_len});
      return range.end - range.begin;
    };
    const int64_t last = seen(q_len - 1), middle = seen(q_len / 2);
    return 2 * last > 3 * middle   ? KeysOfLater::more
           : 3 * last < 2 * middle ? KeysOfLater::unknown
                                   : KeysOfLater::alike;
  } else {
    return Ranges<S>::value ? KeysOfLater::unknown : KeysOfLater::alike;
  }
}
// The softmax state of a row before its first key: empty, or with the sink's logit, which has no value.
template <class S>
KERNELS_HD SoftmaxState<float> sink_state(const S& score, int64_t head) {
  SoftmaxState<float> state;
  if constexpr (is_score_pair<S>::value) {
    state = sink_state(score.first, head);
    state.merge(sink_state(score.second, head));
  } else if constexpr (HasSink<S>::value) {
    const float logit = score.sink(head);
    if (!(logit == -infinity<float>())) state = {logit, 1.f};
  }
  return state;
}

// ---- what attention takes ------------------------------------------------------------------------------------------

// Whether a score does anything, or is explicitly no_mask().
template <class S>
struct Acts {
  static constexpr bool value = Transforms<S>::value || Masks<S>::value || Ranges<S>::value || HasSink<S>::value ||
                                std::is_same<S, NoMask>::value;
};
template <class A, class B>
struct Acts<ScorePair<A, B>> { static constexpr bool value = Acts<A>::value && Acts<B>::value; };
// Whether it has any of the names; KERNELS_OPTIONAL reports a wrong signature.
template <class S>
struct NamesSome {
  static constexpr bool value = names_transform<S>::value || names_visible<S>::value || names_visible_keys<S>::value ||
                                names_kv_range<S>::value || names_sink<S>::value;
};
template <class A, class B>
struct NamesSome<ScorePair<A, B>> {
  static constexpr bool value = (Acts<A>::value || NamesSome<A>::value) && (Acts<B>::value || NamesSome<B>::value);
};
// Whether every part with visible_keys() also has visible(), so that both kinds of kernels mask the same keys.
template <class S>
struct MasksAlike {
  static constexpr bool value = Masks<S>::value || names_visible<S>::value || !MasksRuns<S>::value;
};
template <class A, class B>
struct MasksAlike<ScorePair<A, B>> {
  static constexpr bool value = MasksAlike<A>::value && MasksAlike<B>::value;
};

template <class S>
constexpr bool takes_score() {
  constexpr bool row_map = std::is_same<S, Causal>::value, score = std::is_base_of<Score, S>::value;
  static_assert(
      !row_map,
      "k::causal(q_len, kv_len) is the map for rows of logits that lie in memory: the score of attention is k::causal()");
  static_assert(
      row_map || !is_map<S>,
      "a map where there must be a score (score.h): k::soft_cap(cap), k::score_bias(...), composed with &, or one of your own");
  static_assert(
      score || is_map<S>,
      "there must be a score here (score.h): k::no_mask(), k::causal() ..., or one of your own, which derives from k::Score");
  static_assert(!score || Acts<S>::value || NamesSome<S>::value,
                "a score that would mask and change nothing: it has neither transform, visible and kv_range nor sink, "
                "as score.h writes them");
  static_assert(
      MasksAlike<S>::value,
      "a score with visible_keys() and without visible(): a single query, and the CPU, ask for one key at a time");
  return score && Acts<S>::value && MasksAlike<S>::value;
}

// Reports a call that leaves out the score.
template <class Q>
Status without_score() {
  static_assert(std::is_void<Q>::value,
                "there must be a score behind the shape (score.h): k::no_mask(), k::causal() ..., composed with &");
  return not_compiled();
}

// Whether S, and what follows it in a call, is a score with nothing behind it, or with options: the workspace is
// missing.
template <class S, class... Rest>
constexpr bool lacks_workspace =
    !std::is_same<S, Workspace>::value &&
    std::is_same<std::tuple_element_t<0, std::tuple<Rest..., Attention>>, Attention>::value;

// Reports a call of decode() without a workspace, or with the options in front of it, and below one of attention().
template <class S>
Status without_workspace() {
  constexpr bool score = takes_score<S>();
  static_assert(
      !score,
      "decode: a workspace goes behind the score, and options behind that: decode(ex, q, kv, o, shape, score, "
      "k::Workspace{p, bytes}, options), of decode_workspace_bytes(ex, shape, options) bytes");
  return not_compiled();
}
template <class S>
Status options_before_workspace() {
  static_assert(
      std::is_void<S>::value,
      "attention: options go behind the workspace: attention(ex, q, kv, o, shape, score, workspace, options)");
  return not_compiled();
}

template <class Kv>
constexpr bool takes_view() {
  constexpr bool view = std::is_base_of<KvView, Kv>::value;
  static_assert(
      view,
      "there must be a view of keys and values here (kv.h): k::dense_kv(k::nhd(...), k::nhd(...), lengths), k::ragged_kv, k::paged_kv, or one of your own, which derives from k::KvView");
  if constexpr (view) (void)has_kv_alignment<Kv>::value;  // the CPU does not use it; reports a wrong signature here too
  return view;
}

template <class Q, class Kv, class Out, class S>
constexpr bool takes_attention() {
  constexpr bool right = takes_source<Q>() && takes_view<Kv>() && takes_sink<Out>() && takes_score<S>();
  if constexpr (right) {
    static_assert(!is_row_sink<Out>, "quantize() needs a whole row of results, and attention makes it head by head");
    static_assert(!wants_pairs<Out>(),
                  "rope | sink is for products; rotate the queries as they are read: source | rope");
    static_assert(
        !has_effects<Q>,
        "attention reads queries more than once, and tee() or another effect must happen once: make them before with copy()");
    static_assert(std::is_same<compute_type<Q>, float>::value,
                  "attention is computed in float: queries of double are not taken");
    return !is_row_sink<Out> && !wants_pairs<Out>() && std::is_same<compute_type<Q>, float>::value;
  } else {
    return false;
  }
}

}  // namespace detail
KERNELS_END
