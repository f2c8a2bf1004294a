// Shape, options and argument checks that all attention calls share, on the GPU and the CPU.
#pragma once

#include <cstdint>

#include "arguments.h"
#include "head_sizes.h"
#include "overlap.h"
#include "softmax_state.h"
#include "workspace.h"

KERNELS_BEGIN

// `batch` sequences of q_len queries. A query is a row of the source of queries: head h is columns h * dim to h * dim +
// dim - 1. A row of the sink is likewise one query's results, with heads of v_dim columns. Head h reads keys and values
// of head h / (heads / kv_heads). Source and sink determine where rows and heads are in memory: k::load(q, heads *
// dim), or any strides with heads.h.
//
// Sequence b has rows b * q_len to b * q_len + q_len - 1. With q_offsets (batch + 1 numbers, in the memory space in
// which the call runs) it has rows q_offsets[b] to q_offsets[b + 1] - 1, and q_len is the maximum of any sequence.
// `tokens`, if known, is an upper bound on the sum over all sequences; it spares attention() on the GPU idle blocks
// where one sequence is much longer than the others.
struct AttentionShape {
  int64_t batch, q_len, heads, kv_heads, dim;
  int64_t v_dim = 0;  // 0: dim
  const int32_t* q_offsets = nullptr;
  int64_t tokens = 0;  // 0: unknown

  KERNELS_HD int64_t value_dim() const { return v_dim > 0 ? v_dim : dim; }
  KERNELS_HD int64_t group() const { return heads / kv_heads; }
  KERNELS_HD int64_t first_query(int64_t b) const { return q_offsets ? q_offsets[b] : b * q_len; }
  int64_t total_queries() const { return q_offsets && tokens > 0 && tokens < batch * q_len ? tokens : batch * q_len; }
  KERNELS_HD int64_t queries(int64_t b) const {
    return q_offsets ? greater<int64_t>(0, int64_t(q_offsets[b + 1]) - q_offsets[b]) : q_len;
  }
};

// Options: k::Attention{}.scale(0.1).lse(p).
//
// scale(s): the factor of the logits, by default 1 / sqrt(dim).
//
// lse(p, ld): receives the natural logarithm of each row's sum of exponentials, including sinks, of query t and head h
// at p[t * ld + h]; -inf if no key is visible. ld: by default the number of heads.
//
// splits(n), for decode() on the GPU: the keys of each sequence are split into n parts, from 1 to 256 (split-KV). A
// sequence then has the same bits alone and in any batch with the same shape.q_len. By default decode() splits where
// that distributes the batch evenly, so bits depend on the batch; all other calls are independent of it anyway.
// attention() with a workspace uses n parts as well.
//
// most_keys(n), for decode() on the GPU, which reads the lengths only when the kernel runs: no sequence is expected to
// have more than n keys. If that is some hundreds, or with few sequences some thousands, decode() uses a kernel without
// a schedule and without a merge through memory, which takes less time. A sequence with more keys still gets correct
// results, but slower. attention() needs a smaller workspace. 0: unknown.
//
// new_keys(n), for decode() on the GPU with Exec::programmatic: promises that the kernel ahead writes no keys and
// values except the last n of each sequence, nor scales of other keys, lengths (which already count the new keys),
// offsets, page tables, or what a score's kv_range() reads. Tensor-core kernels for up to 8 rows then load the first
// old keys before that kernel has ended, if the keys are in a view of kv.h and have no scales. With
// Exec::constant_weights the promise must hold for every kernel that may still be running.
//
// in_8_bits(), for attention() on the GPU with queries, keys and values of float8_e4m3: products use 8-bit tensor cores
// (sm_90a), for which softmax weights are rounded to 3 mantissa bits. Without this option, and where there is no such
// kernel, products keep the precision of half.
class Attention {
 public:
  Attention() = default;
  template <class N, class = std::enable_if_t<std::is_arithmetic<N>::value>>
  Attention(N) {
    static_assert(!std::is_arithmetic<N>::value,
                  "attention: a number where there must be options: k::Attention{}.scale(s) multiplies logits by it");
  }

  Attention& scale(double value) { scale_ = value, scaled_ = true; return *this; }
  Attention& lse(float* p, int64_t ld = 0) { lse_ = p, ld_ = ld, wanted_ = true; return *this; }
  Attention& splits(int n) { splits_ = n, split_ = true; return *this; }
  Attention& most_keys(int64_t n) { most_keys_ = n; return *this; }
  Attention& new_keys(int64_t n) { new_keys_ = n, old_ready_ = true; return *this; }
  Attention& in_8_bits(bool yes = true) { in_8_bits_ = yes; return *this; }
  bool wants_8_bits() const { return in_8_bits_; }
  KERNELS_HD int fixed_splits() const { return splits_; }  // 0: none
  int64_t expected_keys() const { return most_keys_; }   // 0: unknown
  KERNELS_HD bool old_keys_ready() const { return old_ready_; }
  // The number of a sequence's keys that are old.
  KERNELS_HD int64_t ready_keys(int64_t keys) const { return greater<int64_t>(0, keys - new_keys_); }

  float scale_for(int64_t dim) const { return static_cast<float>(scaled_ ? scale_ : 1 / std::sqrt(double(dim))); }
  KERNELS_HD bool writes_lse() const { return lse_ != nullptr; }
  KERNELS_HD void write_lse(float value, int64_t query, int64_t head, int64_t heads) const {
    if (lse_ != nullptr) lse_[query * (ld_ > 0 ? ld_ : heads) + head] = value;
  }
  Status check(const AttentionShape& shape) const {
    const double most = largest<float>();  // logits are floats
    if (scaled_ && !(scale_ >= -most && scale_ <= most)) return invalid("the scale is infinite as a float, or NaN");
    if (split_ && (splits_ < 1 || splits_ > 256)) return invalid("splits is less than 1, or exceeds 256");
    if (most_keys_ < 0) return invalid("most_keys is negative");
    if (new_keys_ < 0) return invalid("new_keys is negative");
    return check_lse(shape.heads);
  }
  Status check_merge(int64_t heads) const {
    return scaled_ ? invalid("the logits are scaled already") : check_lse(heads);
  }

 private:
  Status check_lse(int64_t heads) const {
    if (wanted_)
      KERNELS_TRY(detail::check_pointer(lse_, "the pointer to the logsumexp is null",
                                        "the pointer to the logsumexp is not aligned for floats"));
    if (ld_ < 0 || (ld_ > 0 && ld_ < heads))
      return invalid("the row stride of the logsumexp is smaller than the number of heads");
    return {};
  }

  double scale_ = 0;
  float* lse_ = nullptr;
  int64_t ld_ = 0, most_keys_ = 0, new_keys_ = 0;
  int splits_ = 0;
  bool scaled_ = false, wanted_ = false, split_ = false, old_ready_ = false, in_8_bits_ = false;
};

// Several parts of the keys, each with results for the same queries.
struct MergeShape {
  int64_t parts, tokens, heads, dim;
};

namespace detail {

constexpr int64_t kMostDecodeQueries = 32;

// kDim: N of attention<N>() and decode<N>(), or 0.
template <int kDim>
Status check_largest_head(const AttentionShape& shape, const char* why) {
  check_largest_head<kDim>();
  return kDim > 0 && greater(shape.dim, shape.value_dim()) > kDim ? invalid(why) : Status{};
}

KERNELS_OPTIONAL(has_kv_check, check, std::declval<const F&>().check(kAny, kAny, kAny, kAny),
                 "k::Status check(int64_t batch, int64_t heads, int64_t dim, int64_t v_dim) const")
KERNELS_NAME(alignment)
KERNELS_OPTIONAL(has_kv_alignment, alignment, std::declval<const F&>().alignment(), "int alignment() const")
KERNELS_OPTIONAL(has_score_check, check, std::declval<const F&>().check(std::declval<const AttentionShape&>()),
                 "k::Status check(const k::AttentionShape& shape) const")

// `empty` is set if there is nothing to do. `most_queries`: the most queries of a sequence that the call supports.
template <class Q, class Kv, class Out, class S>
Status check_attention(const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape, const S& score,
                       const Attention& options, int64_t most_queries, bool& empty) {
  empty = true;
  constexpr int64_t limit = INT32_MAX;
  if (shape.batch < 0) return invalid("batch is negative");
  if (shape.q_len < 0) return invalid("q_len is negative");
  if (shape.tokens < 0) return invalid("tokens is negative");
  if (shape.heads < 1) return invalid("heads is less than 1");
  if (shape.kv_heads < 1) return invalid("kv_heads is less than 1");
  if (shape.heads % shape.kv_heads != 0) return invalid("heads is no multiple of kv_heads");
  if (shape.v_dim < 0) return invalid("v_dim is negative");
  KERNELS_TRY(check_head_dims(shape.dim, shape.value_dim()));
  if (shape.batch > limit) return unsupported("batch exceeds 2^31 - 1");
  if (shape.q_len > limit) return unsupported("q_len exceeds 2^31 - 1");
  if (shape.heads > 65536) return unsupported("heads exceeds 65536");
  if (shape.q_len > most_queries) return unsupported("q_len exceeds 32: call attention()");
  KERNELS_TRY(options.check(shape));
  if (reinterpret_cast<uintptr_t>(shape.q_offsets) % alignof(int32_t) != 0)
    return invalid("the pointer q_offsets is not aligned for 32-bit numbers");
  if constexpr (has_score_check<S>::value) KERNELS_TRY(score.check(shape));
  if (shape.batch == 0 || shape.q_len == 0) return {};
  KERNELS_TRY(check_of(q, shape.batch * shape.q_len, shape.heads * shape.dim).of("q"));
  KERNELS_TRY(check_of(out, shape.batch * shape.q_len, shape.heads * shape.value_dim()).of("out"));
  if constexpr (has_kv_check<Kv>::value)
    KERNELS_TRY(kv.check(shape.batch, shape.kv_heads, shape.dim, shape.value_dim()));
  // With offsets only the device knows the number of rows.
  const int64_t rows = shape.q_offsets == nullptr ? shape.batch * shape.q_len : 1;
  const Plane queries = plane_of(q, rows, shape.heads * shape.dim),
              results = plane_of(out, rows, shape.heads * shape.value_dim());
  if (share_bytes(queries, results) && !(in_place(queries, results) && shape.dim == shape.value_dim()))
    return invalid("out overlaps q, and not element for element");
  empty = false;
  return {};
}

// For calls with further conditions on writing results in place of the queries.
template <class Q, class Out>
Status check_in_place(const Q& q, const Out& out, const AttentionShape& shape, bool possible, const char* why_not) {
  if (possible || shape.batch == 0 || shape.q_len == 0) return {};
  return share_bytes(plane_of(q, 1, shape.heads * shape.dim), plane_of(out, 1, shape.heads * shape.value_dim()))
             ? invalid(why_not)
             : Status{};
}

// Whether merge_states accepts these types; if not, a static_assert says why.
template <class O, class L, class Out>
constexpr bool takes_states() {
  constexpr bool right = takes_source<O>() && takes_source<L>() && takes_sink<Out>();
  if constexpr (right) {
    static_assert(!is_row_sink<Out>,
                  "quantize() needs a whole row of results, and merge_states makes them pack by pack");
    static_assert(
        !has_effects<O> && !has_effects<L>,
        "merge_states reads logsumexps more than once, and tee() or another effect must happen once: make its inputs before with copy()");
  }
  return right && !is_row_sink<Out>;
}

template <class O, class L, class Out>
Status check_merge(const O& o, const L& lse, const Out& out, const MergeShape& shape, const Attention& options,
                   bool& empty) {
  empty = true;
  if (shape.parts < 0) return invalid("parts is negative");
  if (shape.tokens < 0) return invalid("tokens is negative");
  if (shape.heads < 1) return invalid("heads is less than 1");
  if (shape.dim < 1) return invalid("dim is less than 1");
  if (shape.heads > 65536) return unsupported("heads exceeds 65536");
  if (shape.dim > 65536) return unsupported("dim exceeds 65536");
  if (shape.parts > 0 && shape.tokens > INT64_MAX / shape.parts) return invalid("parts x tokens exceeds 64 bits");
  KERNELS_TRY(options.check_merge(shape.heads));
  if (shape.tokens == 0) return {};
  KERNELS_TRY(check_of(o, shape.parts * shape.tokens, shape.heads * shape.dim).of("o"));
  KERNELS_TRY(check_of(lse, shape.parts * shape.tokens, shape.heads).of("lse"));
  KERNELS_TRY(check_of(out, shape.tokens, shape.heads * shape.dim).of("out"));
  const int64_t rows = shape.parts * shape.tokens, cols = shape.heads * shape.dim;
  const Plane results = plane_of(out, shape.tokens, cols);
  if (share_bytes(plane_of(o, rows, cols), results) && !in_place(plane_of(o, shape.tokens, cols), results))
    return invalid("out overlaps o, and not the first part element for element");
  if (share_bytes(plane_of(lse, rows, shape.heads), results))
    return invalid("out overlaps lse, which is read more than once");
  empty = false;
  return {};
}

}  // namespace detail
KERNELS_END
