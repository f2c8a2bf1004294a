// Sinks that write new keys and values into the KV cache, where attention will read them.
//
// Row r of the results is a token; its columns are heads of head_dim, side by side.
//
//   auto kv = k::paged_kv(k::hnd(kp, page, heads, dim), k::hnd(vp, page, heads, dim), k::pages(table, ld, page),
//                         lengths);
//   k::AppendAt at{positions};                 // decoding: row r is the one new token of sequence r, at positions[r]
//   k::AppendAt at{positions, sequences};      // everything else: row r is a token of sequence sequences[r]
//   k::matmul(ex, x, k::stacked(k::paired(wq, rope), nq, k::paired(wk, rope), nk, k::plain(wv), nk),
//             k::qkv(rope | k::store(q, nq), nq, rope | k::append_keys(kv, at, dim), nk,
//                    k::append_values(kv, at, dim), nk), shape);
//
// WITHOUT `sequences` EACH ROW IS A SEQUENCE OF ITS OWN. The tokens of a prompt would then go to different sequences,
// and the call cannot detect the mistake: rows beyond the number of sequences write past the end of the cache and read
// past the end of the page table.
//
// The view is made of non-const pointers; attention reads through the same view. Tokens at negative positions are not
// written, nor are tokens beyond the positions that nhd() or hnd() was given, or beyond the end of a page-table row.
//
// Quantized caches:
// - With one scale for the tensor or for each head, values are divided by that scale and rounded. With a scale of 0,
//   finite values count as 0.
// - With a scale for each position and head, the call computes the scales and writes them, as float, half or bfloat16,
//   to the memory from which the view reads them. This needs a whole head before its codes are written. Therefore only
//   copy(), row operations and norm_heads() can do it; other calls refuse such sinks:
//
//   auto kv = k::paged_kv(k::nhd(k8, page, heads, dim).scales(ks, page * heads, heads, 1),
//                         k::nhd(v8, page, heads, dim).scales(vs, page * heads, heads, 1), pages, lengths);
//   k::copy(ex, k::load(k, ld) | rope, k::append_keys(kv, at, dim, ks), rows, heads * dim);
//   k::copy(ex, k::load(v, ld), k::append_values(kv, at, dim, vs), rows, heads * dim);
//   // or both at once, with norms of heads or, `normed` being 0, without: norm_heads.cuh
//
// Computed scales of int8_t, float8_e4m3 and float8_e5m2 follow quantize.h.
//
// 4-bit codes, nhd<k::Int4>(words, ...), are written by copy() and row operations only, as other calls do not have
// eight adjacent columns at once. Codes and scales are those of pack_int4() with each head as one group, and head_dim
// is a multiple of 8: the scale is the value of largest magnitude, with its sign, / -8, or 0 where that rounds to 0;
// stored as half it is at most 65504. Only a NaN or an infinity in the head makes the scale NaN or infinite; then no
// code of the head dequantizes to a finite number. Uint4 cannot be written: it has no codes for negative values, as
// views have no zero points.
#pragma once

#include "core/divisor.h"
#include "kv.h"
#include "quantize.h"

KERNELS_BEGIN

// Where each row's token goes. positions and sequences have one entry for each row, in the memory space in which the
// call runs (host or device). Without sequences, row r belongs to sequence r: only for one new token per sequence,
// never for a prompt.
class AppendAt {
 public:
  explicit AppendAt(const int32_t* positions, const int32_t* sequences = nullptr)
      : positions_(positions), sequences_(sequences) {}

  // A ring buffer of `capacity` positions for sequences of any length (StreamingLLM). The first `kept` tokens stay; all
  // later ones wrap around in the remaining capacity - kept positions. Attention does not depend on the order of keys,
  // so it reads the first min(length, capacity) positions. lengths: the true lengths, including the new tokens. If a
  // call brings more tokens than fit, only the last ones are written.
  AppendAt ring(int64_t capacity, int64_t kept, const Lengths& lengths) const {
    AppendAt out = *this;
    out.capacity_ = capacity, out.kept_ = kept, out.lengths_ = lengths, out.ring_ = true;
    return out;
  }

  KERNELS_HD int64_t sequence(int64_t row) const { return sequences_ != nullptr ? sequences_[row] : row; }
  // Negative: the token is not written.
  KERNELS_HD int64_t position(int64_t row) const {
    const int64_t at = positions_[row], around = capacity_ - kept_;
    if (!ring_ || at < kept_) return at;
    return at < lengths_(sequence(row)) - around ? -1 : kept_ + (at - kept_) % around;
  }
  int64_t ring_capacity() const { return capacity_; }  // 0: no ring
  Status check() const {
    KERNELS_TRY(detail::check_pointer(positions_, "append: the pointer to the positions is null",
                                      "append: the pointer to the positions is not aligned for 32-bit numbers"));
    if (reinterpret_cast<uintptr_t>(sequences_) % alignof(int32_t) != 0)
      return invalid("append: the pointer to the sequences is not aligned for 32-bit numbers");
    if (ring_ && (kept_ < 0 || capacity_ <= kept_)) return invalid("append: the ring keeps more positions than it has");
    return lengths_.check();
  }

 private:
  const int32_t *positions_, *sequences_;
  int64_t capacity_ = 0, kept_ = 0;
  Lengths lengths_ = 0;
  bool ring_ = false;
};

template <class Tensor, class Where>
class Append : public Functor {
 public:
  static constexpr Role role = Role::sink;
  using T = typename Tensor::Element;
  Append(const Tensor& tensor, const Where& where, const AppendAt& at, int64_t head_dim)
      : tensor_(tensor),
        where_(where),
        at_(at),
        heads_(head_dim),
        head_dim_(head_dim),
        most_positions_(where.most_positions(tensor.positions())) {
    static_assert(Tensor::writable, "append: the view is made of pointers to const: nhd() and hnd() take others, too");
  }

  static constexpr int widest = 16 / int(sizeof(T));
  int max_pack() const { return detail::pack_at(head_dim_, tensor_.max_pack()); }
  Status check(int64_t, int64_t cols) const {
    KERNELS_TRY(check_places(cols));
    if (tensor_.scales_positions())
      return unsupported(
          "append: scales for each position are not known yet: copy(), row operations and norm_heads() find them for "
          "append_keys(kv, at, head_dim, scales)");
    return {};
  }
  // All checks but those of the scales.
  Status check_places(int64_t cols) const {
    KERNELS_TRY(at_.check());
    if (head_dim_ < 1 || cols % head_dim_ != 0) return invalid("append: the columns are no whole heads");
    if (Tensor::words && head_dim_ % 8 != 0) return invalid("append: heads of 4-bit codes are no whole words");
    if (cols > INT32_MAX) return unsupported("append: more than 2^31 - 1 columns");
    KERNELS_TRY(where_.check());
    if (tensor_.heads() >= 0 && tensor_.heads() != cols / head_dim_)
      return invalid("append: the columns are more or fewer heads of head_dim than nhd() or hnd() was told of");
    KERNELS_TRY(tensor_.check(cols / head_dim_, head_dim_));
    KERNELS_TRY(where_.fits(tensor_.positions()));
    if (lesser(at_.ring_capacity(), kMostKeys) > where_.most_positions(tensor_.positions()))
      return invalid(std::is_same<Where, Paged>::value
                         ? "append: the ring has more positions than a row of the page table"
                         : "append: the ring has more positions than nhd() or hnd() was told of");
    return {};
  }
  const Tensor& tensor() const { return tensor_; }
  int64_t head_dim() const { return head_dim_; }

  // Where a head's codes and its scale go; codes is null if the token is not written.
  struct Head {
    T* codes;
    int64_t scale;
  };
  KERNELS_HD Head head(int64_t row, int64_t index) const {
    const int64_t pos = at_.position(row);
    if (!has(pos)) return {nullptr, 0};
    const KvSlot slot = where_.slot(at_.sequence(row), pos);
    return {at(slot, index), tensor_.scale_at(slot, index)};
  }
  KERNELS_HD int64_t head_of(int64_t col) const { return heads_.quotient(static_cast<uint32_t>(col)); }

  // Where a pack goes (null: it is not written), and the factor that it is multiplied by.
  struct Place {
    T* to;
    float factor;
  };
  template <int N>
  KERNELS_HD Place prepare(int64_t row, int64_t col) const {
    const int64_t pos = at_.position(row);
    if (!has(pos)) return {nullptr, 1.f};
    const int64_t head = heads_.quotient(static_cast<uint32_t>(col));
    const KvSlot slot = where_.slot(at_.sequence(row), pos);
    T* const to = at(slot, head) + (col - head * head_dim_);
    if constexpr (Tensor::Run::scaled) {
      const float scale = convert<float>(tensor_.scale_data()[tensor_.scale_at(slot, head)]);
      return {to, scale != 0.f ? detail::bounded(divide(1.f, scale)) : 0.f};
    } else {
      return {to, 1.f};
    }
  }
  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>& v, const Place& place, int64_t, int64_t) const {
    if (place.to == nullptr) return;
    if constexpr (Tensor::Run::scaled) write<N>(place.to, convert<T>(convert<float>(v) * place.factor));
    else write<N>(place.to, convert<T>(v));
  }
  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>& v, int64_t row, int64_t col) const {
    store(v, prepare<N>(row, col), row, col);
  }

 private:
  KERNELS_HD bool has(int64_t pos) const { return uint64_t(pos) < uint64_t(most_positions_); }
  // The constructor has refused pointers to const; the cast avoids a second error message.
  KERNELS_HD T* at(const KvSlot& slot, int64_t head) const { return const_cast<T*>(tensor_.at(slot, head)); }

  Tensor tensor_;
  Where where_;
  AppendAt at_;
  detail::Divisor heads_;
  int64_t head_dim_, most_positions_;  // per sequence
};

namespace detail {

// For Int4: finds the value of largest magnitude, with its sign; of equal ones the first, as in pack_int4(). It becomes
// code -8, which has no positive counterpart.
template <class S>
struct LargestSeen<Int4, S> {
  uint64_t largest = 0;  // high word: magnitude as float bits; low word: (2^31 - 1 - column) * 2 + sign
  KERNELS_HD float value() const { return bit_cast<float>(uint32_t(largest >> 32) | uint32_t(largest) << 31); }
  KERNELS_HD S scale() const { return rounded_scale<S>(value() * -0.125f); }
  // The argument of codes(): the scale, as it is read back after rounding.
  KERNELS_HD float finish() const { return convert<float>(scale()); }

  template <class C, int N>
  KERNELS_HD void take(const Pack<C, N>& v, int64_t col) {
    uint32_t size = 0, place = 0;
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) {
      const uint32_t bits = bit_cast<uint32_t>(convert<float>(v.v[i]));
      const bool larger = (bits & 0x7fffffffu) > size;
      size = larger ? bits & 0x7fffffffu : size;
      place = larger ? (0x7fffffffu - uint32_t(i) - uint32_t(col)) << 1 | bits >> 31 : place;
    }
    const uint64_t seen = uint64_t(size) << 32 | place;
    largest = seen > largest ? seen : largest;
  }

  template <int N>
  static KERNELS_HD Pack<uint32_t, N / 8> codes(const Pack<float, N>& v, float scale) {
    Pack<uint32_t, N / 8> words{};
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) words.v[i / 8] |= Int4::code(v.v[i], scale) << int4_shift(i % 8);
    return words;
  }
};

// Whether scales can be computed for codes of this view, with scales of type S.
template <class Tensor, class S>
constexpr bool takes_found_scales_of() {
  constexpr bool is_uint4 = std::is_same<typename Tensor::Format, Uint4>::value;
  constexpr bool codes =
      Tensor::words ? std::is_same<typename Tensor::Format, Int4>::value : is_code<typename Tensor::Element>;
  constexpr bool scales = std::is_same<typename Tensor::Scale, S>::value;
  static_assert(!is_uint4,
                "append: Uint4 has no codes for what is below 0, as views have no zero points: take k::Int4");
  static_assert(is_uint4 || codes, "append: scales are found for int8_t, float8_e4m3, float8_e5m2 and k::Int4");
  static_assert(!codes || Tensor::scaled, "append: the view has no scales: k::nhd(...).scales(scales, ...)");
  static_assert(!codes || !Tensor::scaled || scales,
                "append: the scales to be written are of another type than those that the view reads");
  return codes && scales;
}

}  // namespace detail

// A sink that computes a scale for each position and head. State collects what the scale depends on: LargestSeen of
// quantize.h, or the specialization above.
template <class Tensor, class Where>
class AppendFound : public Functor {
 public:
  static constexpr Role role = Role::row_sink;
  static constexpr bool by_group = true;
  using Code = std::conditional_t<Tensor::words, typename Tensor::Format, typename Tensor::Element>;
  using Scale = typename Tensor::Scale;
  AppendFound(const Append<Tensor, Where>& to, Scale* scales) : to_(to), scales_(scales), group_(int(to.head_dim())) {}

  static constexpr int widest = 16, narrowest = Tensor::words ? 8 : 1;
  int max_pack() const { return to_.max_pack(); }
  Status check(int64_t, int64_t cols) const {
    KERNELS_TRY(to_.check_places(cols));
    if (static_cast<const void*>(scales_) != static_cast<const void*>(to_.tensor().scale_data()))
      return invalid("append: the scales to be written are not those that the view reads");
    return to_.tensor().check_own_scales(cols / group_, std::is_same<Where, Paged>::value);
  }

  using State = detail::LargestSeen<Code, Scale>;
  KERNELS_HD int group() const { return group_; }
  KERNELS_HD void write_scale(const State& s, int64_t row, int64_t index) const {
    const auto head = to_.head(row, index);
    if (head.codes != nullptr) scales_[head.scale] = s.scale();
  }
  template <class C, int N>
  KERNELS_HD void store(const Pack<C, N>& v, float found, int64_t row, int64_t col) const {
    const int64_t index = to_.head_of(col);
    const auto head = to_.head(row, index);
    if (head.codes != nullptr)
      write<N / narrowest>(head.codes + (col - index * group_) / narrowest, State::codes(convert<float>(v), found));
  }

 private:
  Append<Tensor, Where> to_;
  Scale* scales_;
  int group_;
};

namespace detail {
template <class Tensor, class Where>
Append<Tensor, Where> append(const Tensor& tensor, const Where& where, const AppendAt& at, int64_t head_dim) {
  static_assert(!Tensor::words,
                "append: 4-bit codes are written where scales are found, by copy() and row operations: append_keys(kv, at, head_dim, scales)");
  return {tensor, where, at, head_dim};
}
template <class Tensor, class Where, class S>
auto append(const Tensor& tensor, const Where& where, const AppendAt& at, int64_t head_dim, S* scales) {
  const Append<Tensor, Where> to(tensor, where, at, head_dim);
  if constexpr (takes_found_scales_of<Tensor, S>()) return AppendFound<Tensor, Where>(to, scales);
  else return to;
}
}  // namespace detail

// Sinks for the keys (below: values) of a view without scales, or with one scale for the tensor or for each head.
template <class K, class V, class Where>
auto append_keys(const KvCache<K, V, Where>& kv, const AppendAt& at, int64_t head_dim) {
  return detail::append(kv.keys(), kv.where(), at, head_dim);
}
template <class K, class V, class Where>
auto append_values(const KvCache<K, V, Where>& kv, const AppendAt& at, int64_t head_dim) {
  return detail::append(kv.values(), kv.where(), at, head_dim);
}
// The same with a computed scale for each position and head; `scales` is the pointer that the view reads.
template <class K, class V, class Where, class S>
auto append_keys(const KvCache<K, V, Where>& kv, const AppendAt& at, int64_t head_dim, S* scales) {
  return detail::append(kv.keys(), kv.where(), at, head_dim, scales);
}
template <class K, class V, class Where, class S>
auto append_values(const KvCache<K, V, Where>& kv, const AppendAt& at, int64_t head_dim, S* scales) {
  return detail::append(kv.values(), kv.where(), at, head_dim, scales);
}

// Splits the columns of a result among three sinks of any types: queries first, then keys, then values.
template <class Q, class K, class V>
class Qkv : public Functor {
 public:
  static constexpr bool by_head = detail::is_row_sink<Q> || detail::is_row_sink<K> || detail::is_row_sink<V>;
  static constexpr Role role = by_head ? Role::row_sink : Role::sink;
  KERNELS_HD Qkv(Q q, int64_t q_cols, K k, int64_t k_cols, V v, int64_t v_cols)
      : q_(q), k_(k), v_(v), counts_{q_cols, k_cols, v_cols} {}

  static constexpr int widest = 16;
  static constexpr bool wants_pairs = detail::wants_pairs<Q>() || detail::wants_pairs<K>() || detail::wants_pairs<V>();
  int max_pack() const {
    int most = lesser(detail::max_pack_of(q_), lesser(detail::max_pack_of(k_), detail::max_pack_of(v_)));
    while (most > 1 && (counts_[0] % most != 0 || counts_[1] % most != 0 || counts_[2] % most != 0)) most /= 2;
    return wants_pairs ? greater(2, most) : most;
  }
  Status check(int64_t rows, int64_t cols) const {
    if (counts_[0] < 0 || counts_[1] < 0 || counts_[2] < 0) return invalid("qkv: a number of columns is negative");
    if (counts_[0] > cols || counts_[1] > cols - counts_[0] || counts_[2] != cols - counts_[0] - counts_[1])
      return invalid("qkv: the numbers of columns do not add up to N");
    KERNELS_TRY(detail::check_of(q_, rows, counts_[0]));
    KERNELS_TRY(detail::check_of(k_, rows, counts_[1]));
    return detail::check_of(v_, rows, counts_[2]);
  }
  bool pairs_within(int64_t dim) const {
    for (const int64_t count : counts_) {
      if (count % dim != 0) return false;
    }
    return detail::pairs_within(q_, dim) && detail::pairs_within(k_, dim) && detail::pairs_within(v_, dim);
  }
  KERNELS_HD detail::ColumnPair pair_at(int64_t col) const {
    const int64_t begin = col < counts_[0] ? 0 : col < counts_[0] + counts_[1] ? counts_[0] : counts_[0] + counts_[1];
    const detail::ColumnPair there = col < counts_[0]                ? detail::pair_at(q_, col)
                                     : col < counts_[0] + counts_[1] ? detail::pair_at(k_, col - begin)
                                                                     : detail::pair_at(v_, col - begin);
    return {begin + there.first, begin + there.second};
  }
  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>& v, int64_t row, int64_t col) const {
    if (col < counts_[0]) put(q_, v, row, col);
    else if (col < counts_[0] + counts_[1]) put(k_, v, row, col - counts_[0]);
    else put(v_, v, row, col - counts_[0] - counts_[1]);
  }

 private:
  // Two adjacent columns of one part. A sink that wants pairs gets both at once; any other gets them one by one, as it
  // may take only single elements.
  template <class S, bool = detail::wants_pairs<S>()>
  struct Two {
    decltype(detail::prepare<2>(std::declval<const S&>(), 0, 0)) both;
    KERNELS_HD static Two of(const S& sink, int64_t row, int64_t col) { return {detail::prepare<2>(sink, row, col)}; }
    template <class C>
    KERNELS_HD void put(const S& sink, const Pack<C, 2>& v, int64_t row, int64_t col) const {
      detail::put_prepared(sink, both, v, row, col);
    }
  };
  template <class S>
  struct Two<S, false> {
    decltype(detail::prepare<1>(std::declval<const S&>(), 0, 0)) first, second;
    KERNELS_HD static Two of(const S& sink, int64_t row, int64_t col) {
      return {detail::prepare<1>(sink, row, col), detail::prepare<1>(sink, row, col + 1)};
    }
    template <class C>
    KERNELS_HD void put(const S& sink, const Pack<C, 2>& v, int64_t row, int64_t col) const {
      detail::put_prepared(sink, first, Pack<C, 1>{{v.v[0]}}, row, col);
      detail::put_prepared(sink, second, Pack<C, 1>{{v.v[1]}}, row, col + 1);
    }
  };

 public:
  KERNELS_HD const Q& q() const { return q_; }
  KERNELS_HD const K& k() const { return k_; }
  KERNELS_HD const V& v() const { return v_; }
  KERNELS_HD int64_t q_cols() const { return counts_[0]; }
  KERNELS_HD int64_t k_cols() const { return counts_[1]; }
  template <class A, class B, class C>
  KERNELS_HD Qkv<A, B, C> with(const A& q, const B& k, const C& v) const {
    return {q, counts_[0], k, counts_[1], v, counts_[2]};
  }

  // Only the member of the part that the columns belong to is set.
  struct Prepared {
    Two<Q> q;
    Two<K> k;
    Two<V> v;
  };
  template <int N, std::enable_if_t<N == 2 && wants_pairs, int> = 0>
  KERNELS_HD Prepared prepare(int64_t row, int64_t col) const {
    Prepared out;
    if (col < counts_[0]) out.q = Two<Q>::of(q_, row, col);
    else if (col < counts_[0] + counts_[1]) out.k = Two<K>::of(k_, row, col - counts_[0]);
    else out.v = Two<V>::of(v_, row, col - counts_[0] - counts_[1]);
    return out;
  }
  template <class C>
  KERNELS_HD void store(const Pack<C, 2>& v, const Prepared& prepared, int64_t row, int64_t col) const {
    if (col < counts_[0]) prepared.q.put(q_, v, row, col);
    else if (col < counts_[0] + counts_[1]) prepared.k.put(k_, v, row, col - counts_[0]);
    else prepared.v.put(v_, v, row, col - counts_[0] - counts_[1]);
  }

 private:
  template <class S, int N, class C>
  KERNELS_HD static void put(const S& sink, const Pack<C, N>& v, int64_t row, int64_t col) {
    if constexpr (N == 2) Two<S>::of(sink, row, col).put(sink, v, row, col);
    else detail::put(sink, v, row, col);
  }

  Q q_;
  K k_;
  V v_;
  int64_t counts_[3];
};

template <class Q, class K, class V>
Qkv<Q, K, V> qkv(Q q, int64_t q_cols, K k, int64_t k_cols, V v, int64_t v_cols) {
  static_assert(detail::is_sink<Q> && detail::is_sink<K> && detail::is_sink<V>,
                "qkv() takes three sinks, each with its number of columns");
  return {q, q_cols, k, k_cols, v, v_cols};
}

KERNELS_END
