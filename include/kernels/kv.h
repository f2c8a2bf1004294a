// Views of the KV cache: where the keys and values that attention reads are in memory, and of which type they are.
//
//   auto kv = k::dense_kv(k::nhd(kp, capacity, heads, dim), k::nhd(vp, capacity, heads, dim), lengths);
//   auto kv = k::ragged_kv(k::nhd(kp, tokens, heads, dim), k::nhd(vp, tokens, heads, dim), offsets);
//   auto kv = k::paged_kv(k::hnd(kp, page, heads, dim), k::hnd(vp, page, heads, dim), k::pages(table, ld, page),
//                        lengths);
//   auto kv = k::dense_kv(k::nhd(k8, capacity, heads, dim).scales(s, 0, 0, 1), k::nhd<k::Int4>(v4, ...).scales(...),
//                        lengths);
//
// Tensors. A tensor consists of blocks: the sequences of a batch, or the pages of a pool. A block holds positions, a
// position holds heads, and the elements of a head are contiguous. nhd() and hnd() are the two usual orders; strided()
// is any other, with strides in elements. Calls check that they fit what nhd() and hnd() were given: the number of
// heads is the call's kv_heads, and a page, or a length given as a number, fits into a block.
//
// Types. K and V may differ in layout and in type: float, half, bfloat16, float8_e4m3, float8_e5m2, int8, or 4-bit
// codes, Int4 or Uint4 of core/quant.h, eight in a 32-bit word. Strides of 4-bit tensors are multiples of 8.
//
// Lengths. One number for all sequences, or a pointer to one per sequence; up to 2^31 - 1024 keys. Lengths, offsets and
// page tables are int32 in the memory space in which the call runs: on the GPU they may change between replays of a
// graph.
//
// A view of your own derives from k::KvView and has
//
//   int64_t length(int64_t b) const                          the number of keys of sequence b, at most 2^31 - 1024
//   KvRun key(int64_t b, int64_t head, int64_t pos) const    a run of positions from pos on. Its members:
//   KvRun value(int64_t b, int64_t head, int64_t pos) const    codes: a source whose row i is position pos + i
//                                                              count: the number of positions in the run
//                                                              scales, scale_stride: the factor of row i is
//                                                              scales[i * scale_stride]; without them 1
//                                                            KvRun{k::load(p, ld), count}, or with scales and stride
//   int alignment() const                                    optional: all rows of both begin at multiples of so many
//                                                            bytes. With 16 they are read in wide accesses, without it
//                                                            element by element
//   Status check(batch, heads, dim, v_dim) const             optional
#pragma once

#include "core/attention_call.h"
#include "core/quant.h"
#include "functor.h"
#include "weights.h"

KERNELS_BEGIN

struct KvView : Functor {};

// The largest number of keys of a sequence. The GPU counts positions in 32 bits, including positions past the last key,
// up to the end of its tile.
constexpr int64_t kMostKeys = (int64_t(1) << 31) - 1024;

// A run of positions with equal distances in memory.
template <class Codes_, class Scale = Nothing>
struct KvRun {
  using Codes = Codes_;
  static constexpr bool scaled = !std::is_same<Scale, Nothing>::value;
  static_assert(!scaled || detail::is_scale<Scale>, "kv: scales are float, half or bfloat16");

  Codes codes;
  int64_t count;
  const Scale* scales = nullptr;
  int64_t scale_stride = 0;

  KERNELS_HD float scale(int64_t i) const {
    if constexpr (scaled) return convert<float>(scales[i * scale_stride]);
    else return 1.f;
  }
};

template <class Codes>
KvRun(Codes, int64_t) -> KvRun<Codes>;
template <class Codes, class Scale>
KvRun(Codes, int64_t, const Scale*, int64_t) -> KvRun<Codes, Scale>;

// A position of a sequence: its block, its place in the block, and how many contiguous positions begin there.
struct KvSlot {
  int64_t block, place, count;
};

namespace detail {
// The product of sizes, or kTooFar if it exceeds 64 bits. If one is negative, it is negative.
constexpr int64_t kTooFar = INT64_MIN;
constexpr int64_t stride_of(int64_t a, int64_t b) {
  if (a < 0 || b < 0) return a == kTooFar || b == kTooFar ? kTooFar : -1;
  return b > 0 && a > INT64_MAX / b ? kTooFar : a * b;
}
}  // namespace detail

// ---- tensors -------------------------------------------------------------------------------------------------------

// T: the type that p points to, const or not. Format: Int4 or Uint4 if p points to words of codes, otherwise Nothing.
template <class T, class Format_ = Nothing, class Scale_ = Nothing>
class KvTensor {
 public:
  using Format = Format_;
  using Scale = Scale_;
  using Element = std::remove_const_t<T>;
  static constexpr bool words = !std::is_same<Format, Nothing>::value, writable = !std::is_const<T>::value;
  using Codes = std::conditional_t<words, Words<Format>, DirectLoad<Element, compute_t<Element>>>;
  using Run = KvRun<Codes, Scale>;
  static_assert(!words || std::is_same<Element, uint32_t>::value, "4-bit codes lie in words of 32 bits");
  static constexpr bool scaled = Run::scaled;  // KvRun says which types of scales there are

  // The sizes of a block, where known, and otherwise -1; strides alone do not tell.
  struct Extent {
    int64_t positions = -1, heads = -1, dim = -1;
  };

  KvTensor(T* p, int64_t block_stride, int64_t pos_stride, int64_t head_stride, const Extent& extent = {})
      : p_(p), strides_{block_stride, pos_stride, head_stride}, extent_(extent) {}

  // element = code * scale. The scale of (block, position, head) is p[block * block_stride + position * pos_stride +
  // head * head_stride]: strides 0, 0, 0 mean one scale, 0, 0, 1 one for each head. S: float, half or bfloat16.
  template <class S>
  KvTensor<T, Format, S> scales(const S* p, int64_t block_stride, int64_t pos_stride, int64_t head_stride) const {
    KvTensor<T, Format, S> out(p_, strides_[0], strides_[1], strides_[2],
                               {extent_.positions, extent_.heads, extent_.dim});
    out.set_scales(p, block_stride, pos_stride, head_stride);
    return out;
  }
  template <class S>
  KvTensor<T, Format, S> scale(const S* p) const { return scales(p, 0, 0, 0); }
  template <class S>
  KvTensor<T, Format, S> head_scales(const S* p) const { return scales(p, 0, 0, 1); }
  template <class N, class = std::enable_if_t<std::is_arithmetic<N>::value>>
  KvTensor<T, Format, float> scales(N, int64_t, int64_t, int64_t) const {
    static_assert(!std::is_arithmetic<N>::value,
                  "kv: a number where there must be a pointer: scale(p) reads *p where the call computes");
    return scales(static_cast<const float*>(nullptr), 0, 0, 0);
  }
  template <class N, class = std::enable_if_t<std::is_arithmetic<N>::value>>
  KvTensor<T, Format, float> scale(N s) const { return scales(s, 0, 0, 0); }
  template <class N, class = std::enable_if_t<std::is_arithmetic<N>::value>>
  KvTensor<T, Format, float> head_scales(N s) const { return scales(s, 0, 0, 1); }

  KERNELS_HD Run run(const KvSlot& slot, int64_t head) const {
    return {{at(slot, head), strides_[1]}, slot.count, scales_ + scale_at(slot, head), scale_strides_[1]};
  }
  // For writers: the address of a head's first element, and below the index of its scale.
  KERNELS_HD T* at(const KvSlot& slot, int64_t head) const {
    return p_ + (slot.block * strides_[0] + slot.place * strides_[1] + head * strides_[2]) / (words ? 8 : 1);
  }
  KERNELS_HD int64_t scale_at(const KvSlot& slot, int64_t head) const {
    return slot.block * scale_strides_[0] + slot.place * scale_strides_[1] + head * scale_strides_[2];
  }
  KERNELS_HD const Scale* scale_data() const { return scales_; }
  // Whether scales differ by position or block.
  bool scales_positions() const { return scale_strides_[1] != 0 || scale_strides_[0] != 0; }

  // The widest pack, in elements, that address and strides allow.
  int max_pack() const {
    int most = words ? 32 : 16 / int(sizeof(Element));
    for (const int64_t stride : strides_) {
      if constexpr (words) most = lesser(most, 8 * detail::aligned_pack(p_, stride / 8, 4));
      else most = lesser(most, detail::aligned_pack(p_, stride, most));
    }
    return most;
  }

  // The number of positions and of heads in a block, or -1 if unknown.
  int64_t positions() const { return extent_.positions; }
  int64_t heads() const { return extent_.heads; }

  Status check(int64_t heads, int64_t dim) const {
    KERNELS_TRY(detail::check_pointer(p_, "kv: the pointer to keys or values is null",
                                      "kv: the pointer to keys or values is not aligned for its elements"));
    for (const int64_t stride : strides_) {
      if (stride == detail::kTooFar) return invalid("kv: the positions, heads and columns of a block exceed 64 bits");
      if (stride < 0) return invalid("kv: a stride is negative");
      if (words && stride % 8 != 0) return invalid("kv: a stride of 4-bit codes is not a multiple of 8");
    }
    if (extent_.heads >= 0 && extent_.heads != heads)
      return invalid("kv: nhd() or hnd() was told of more or fewer heads than kv_heads");
    if (extent_.dim >= 0 && extent_.dim < dim)
      return invalid("kv: nhd() or hnd() was told of heads with fewer columns");
    if (strides_[1] < dim) return invalid("kv: the distance between positions is smaller than a head");
    if constexpr (Run::scaled)
      KERNELS_TRY(detail::check_pointer(scales_, "kv: the pointer to scales is null",
                                        "kv: the pointer to scales is not aligned for its elements"));
    for (const int64_t stride : scale_strides_) {
      if (stride < 0) return invalid("kv: a stride of scales is negative");
    }
    return {};
  }

  // For calls that compute and write the scales: two heads or positions that share one would overwrite each other's.
  Status check_own_scales(int64_t heads, bool pages) const {
    if (!scales_positions()) return invalid("append: the view has no scale for each position to be found");
    if (scale_strides_[1] == 0 && extent_.positions != 1)
      return invalid("append: the positions of a block share a scale, where each is to have its own");
    if (scale_strides_[2] == 0 && heads > 1)
      return invalid("append: the heads share a scale, where each is to have its own");
    if (scale_strides_[0] == 0 && pages)
      return invalid("append: the pages share scales, where each is to have its own");
    return {};
  }

  void set_scales(const Scale* p, int64_t block_stride, int64_t pos_stride, int64_t head_stride) {
    scales_ = p;
    scale_strides_[0] = block_stride, scale_strides_[1] = pos_stride, scale_strides_[2] = head_stride;
  }

 private:
  T* p_;
  const Scale* scales_ = nullptr;
  int64_t strides_[3], scale_strides_[3] = {0, 0, 0};
  Extent extent_;
};

// Blocks of `positions` positions (of a page, or the capacity of a sequence); all heads of a position are adjacent.
template <class T>
KvTensor<T> nhd(T* p, int64_t positions, int64_t heads, int64_t dim) {
  const int64_t position = detail::stride_of(heads, dim);
  return {p, detail::stride_of(positions, position), position, dim, {positions, heads, dim}};
}
template <class Format, class T>
KvTensor<T, Format> nhd(T* words, int64_t positions, int64_t heads, int64_t dim) {
  const int64_t position = detail::stride_of(heads, dim);
  return {words, detail::stride_of(positions, position), position, dim, {positions, heads, dim}};
}
// Blocks in which all positions of a head are adjacent.
template <class T>
KvTensor<T> hnd(T* p, int64_t positions, int64_t heads, int64_t dim) {
  const int64_t head = detail::stride_of(positions, dim);
  return {p, detail::stride_of(heads, head), dim, head, {positions, heads, dim}};
}
template <class Format, class T>
KvTensor<T, Format> hnd(T* words, int64_t positions, int64_t heads, int64_t dim) {
  const int64_t head = detail::stride_of(positions, dim);
  return {words, detail::stride_of(heads, head), dim, head, {positions, heads, dim}};
}
// Any other order, with strides in elements. Calls cannot check its positions, heads and dim.
template <class T>
KvTensor<T> strided(T* p, int64_t block_stride, int64_t pos_stride, int64_t head_stride) {
  return {p, block_stride, pos_stride, head_stride};
}
template <class Format, class T>
KvTensor<T, Format> strided(T* words, int64_t block_stride, int64_t pos_stride, int64_t head_stride) {
  return {words, block_stride, pos_stride, head_stride};
}

// ---- where the positions of a sequence are -------------------------------------------------------------------------

// One length for all sequences, an integer of any type, or p[b] for sequence b. Negative lengths count as 0.
class Lengths {
 public:
  template <class Integer, class = std::enable_if_t<std::is_integral<Integer>::value>>
  Lengths(Integer all) : all_(static_cast<int64_t>(all)) {}
  Lengths(const int32_t* p) : p_(p), given_(true) {}

  KERNELS_HD int64_t operator()(int64_t b) const { return greater<int64_t>(0, p_ != nullptr ? p_[b] : all_); }
  Status check() const {
    if (given_)
      KERNELS_TRY(detail::check_pointer(p_, "kv: the pointer to the lengths is null",
                                        "kv: the pointer to the lengths is not aligned for 32-bit numbers"));
    if (all_ < 0) return invalid("kv: the length is negative");
    return all_ > kMostKeys ? unsupported("kv: the length exceeds 2^31 - 1024") : Status{};
  }
  // The length, if the host knows it; 0 for lengths behind a pointer, which are read on the device.
  int64_t known() const { return given_ ? 0 : all_; }
  // An upper bound on every length, as far as the host knows.
  int64_t most() const { return given_ ? kMostKeys : all_; }

 private:
  const int32_t* p_ = nullptr;
  int64_t all_ = 0;
  bool given_ = false;
};

// Each sequence has its own block.
struct Dense {
  Lengths lengths;
  KERNELS_HD int64_t length(int64_t b) const { return lengths(b); }
  KERNELS_HD KvSlot slot(int64_t b, int64_t pos) const { return {b, pos, length(b) - pos}; }
  Status check() const { return lengths.check(); }
  // Of a sequence: what nhd() or hnd() was given; unknown with strided().
  int64_t most_positions(int64_t positions) const { return positions >= 0 ? positions : kMostKeys; }
  int64_t most_keys(int64_t positions) const { return lesser(lengths.most(), most_positions(positions)); }
  Status fits(int64_t positions) const {
    return positions >= 0 && lengths.known() > positions
               ? invalid("kv: the length exceeds the positions that nhd() or hnd() was told of")
               : Status{};
  }
};

// One block for all sequences: sequence b has positions offsets[b] to offsets[b + 1] - 1.
struct Ragged {
  const int32_t* offsets;
  KERNELS_HD int64_t length(int64_t b) const { return greater<int64_t>(0, int64_t(offsets[b + 1]) - offsets[b]); }
  KERNELS_HD KvSlot slot(int64_t b, int64_t pos) const { return {0, offsets[b] + pos, length(b) - pos}; }
  Status check() const {
    return detail::check_pointer(offsets, "kv: the pointer to the offsets is null",
                                 "kv: the pointer to the offsets is not aligned for 32-bit numbers");
  }
  int64_t most_positions(int64_t) const { return kMostKeys; }
  int64_t most_keys(int64_t) const { return kMostKeys; }
  Status fits(int64_t) const { return {}; }
};

// Page i of sequence b is block table[b * ld + i]. A page has any number of positions.
struct Pages {
  const int32_t* table;
  int64_t ld;
  uint32_t size;
};
inline Pages pages(const int32_t* table, int64_t ld, int64_t size) {
  return {table, ld, size < 1 ? 0 : uint32_t(lesser<int64_t>(size, int64_t(INT32_MAX) + 1))};
}

struct Paged {
  Pages pages;
  Lengths lengths;
  KERNELS_HD int64_t length(int64_t b) const { return lengths(b); }
  KERNELS_HD KvSlot slot(int64_t b, int64_t pos) const {
    const uint32_t page = uint32_t(pos) / pages.size, place = uint32_t(pos) - page * pages.size;
    return {pages.table[b * pages.ld + page], place, lesser<int64_t>(pages.size - place, length(b) - pos)};
  }
  Status check() const {
    KERNELS_TRY(detail::check_pointer(pages.table, "kv: the pointer to the page table is null",
                                      "kv: the pointer to the page table is not aligned for 32-bit numbers"));
    if (pages.size == 0) return invalid("kv: the page size is less than 1");
    if (pages.size > uint32_t(INT32_MAX)) return invalid("kv: the page size exceeds 2^31 - 1");
    if (pages.ld < 0) return invalid("kv: the row stride of the page table is negative");
    KERNELS_TRY(lengths.check());
    return lengths.known() > most_positions(0)
               ? invalid("kv: the length exceeds the positions of a row of the page table")
               : Status{};
  }
  // With ld 0 all sequences share one row, with as many pages as they need.
  int64_t most_positions(int64_t) const { return pages.ld > 0 ? lesser(pages.ld, kMostKeys) * pages.size : kMostKeys; }
  int64_t most_keys(int64_t) const { return lesser(lengths.most(), most_positions(0)); }
  Status fits(int64_t positions) const {
    return positions >= 0 && pages.size > positions
               ? invalid("kv: the page size exceeds the positions that nhd() or hnd() was told of")
               : Status{};
  }
};

// ---- views ---------------------------------------------------------------------------------------------------------

template <class K, class V, class Where>
class KvCache : public KvView {
 public:
  KvCache(K k, V v, Where where) : k_(k), v_(v), where_(where) {}

  KERNELS_HD int64_t length(int64_t b) const { return where_.length(b); }
  KERNELS_HD typename K::Run key(int64_t b, int64_t head, int64_t pos) const {
    return k_.run(where_.slot(b, pos), head);
  }
  KERNELS_HD typename V::Run value(int64_t b, int64_t head, int64_t pos) const {
    return v_.run(where_.slot(b, pos), head);
  }
  Status check(int64_t, int64_t kv_heads, int64_t dim, int64_t v_dim) const {
    KERNELS_TRY(where_.check());
    KERNELS_TRY(k_.check(kv_heads, dim).of("keys"));
    KERNELS_TRY(where_.fits(k_.positions()).of("keys"));
    KERNELS_TRY(v_.check(kv_heads, v_dim).of("values"));
    return where_.fits(v_.positions()).of("values");
  }

  KERNELS_HD const K& keys() const { return k_; }
  KERNELS_HD const V& values() const { return v_; }
  KERNELS_HD const Where& where() const { return where_; }

 private:
  K k_;
  V v_;
  Where where_;
};

namespace detail {
KERNELS_DETECT(has_runs, std::declval<typename F::Run>())
template <class K, class V, class Where>
auto kv_cache(K k, V v, const Where& where) {
  constexpr bool tensors = has_runs<K>::value && has_runs<V>::value;
  static_assert(
      tensors,
      "kv: keys and values are tensors, which say where heads and positions lie: k::nhd(p, positions, heads, dim), k::hnd or k::strided");
  using Any = KvTensor<const float>;
  if constexpr (tensors) return KvCache<K, V, Where>(k, v, where);
  else return KvCache<Any, Any, Where>({nullptr, 0, 0, 0}, {nullptr, 0, 0, 0}, where);
}
}  // namespace detail

// Each sequence has a block of its own: block b is sequence b.
template <class K, class V>
auto dense_kv(K k, V v, Lengths lengths) { return detail::kv_cache(k, v, Dense{lengths}); }
// All sequences are in one block, one after the other: offsets has batch + 1 entries.
template <class K, class V>
auto ragged_kv(K k, V v, const int32_t* offsets) { return detail::kv_cache(k, v, Ragged{offsets}); }
// Sequences consist of pages, each a block of the tensors.
template <class K, class V>
auto paged_kv(K k, V v, Pages pages, Lengths lengths) { return detail::kv_cache(k, v, Paged{pages, lengths}); }

KERNELS_END
