// Functors in OneFlow's form, of every kind that its kernels use, for the GPU and the CPU: elementwise, broadcast with
// an index helper, tril, dropout with a mask, affine, skip in place, group norm with channels first and last,
// quantizing. They move a pack as one word, as OneFlow's do: on the GPU a misaligned one faults, on the CPU it is
// counted.
#pragma once

#include <kernels/core/dtype.h>
#include <kernels/core/math.h>

#include <atomic>

namespace test {
namespace flow {

namespace k = kernels;

inline std::atomic<int64_t>& misaligned() {
  static std::atomic<int64_t> count{0};
  return count;
}

template <class T, int N>
struct alignas(N * sizeof(T)) Word {
  T elem[N];
};
template <int N, class T>
KERNELS_HD auto* word_at(T* p) {
#if !defined(KERNELS_DEVICE_CODE)
  if (reinterpret_cast<uintptr_t>(p) % (N * sizeof(T)) != 0) ++misaligned();
#endif
  using Element = std::remove_const_t<T>;
  return reinterpret_cast<std::conditional_t<std::is_const<T>::value, const Word<Element, N>, Word<Element, N>>*>(p);
}
#if defined(KERNELS_DEVICE_CODE)
template <int N, class T>
KERNELS_HD Word<std::remove_const_t<T>, N> get(T* p) { return *word_at<N>(p); }
template <int N, class T>
KERNELS_HD void put(T* p, const Word<T, N>& word) { *word_at<N>(p) = word; }
#else
template <int N, class T>
KERNELS_HD Word<std::remove_const_t<T>, N> get(T* p) {
  Word<std::remove_const_t<T>, N> word;
  word_at<N>(p);
  memcpy(static_cast<void*>(&word), static_cast<const void*>(p), sizeof(word));
  return word;
}
template <int N, class T>
KERNELS_HD void put(T* p, const Word<T, N>& word) {
  word_at<N>(p);
  memcpy(static_cast<void*>(p), static_cast<const void*>(&word), sizeof(word));
}
#endif

// Where a row of scores finds its mask. Its copy constructor is for the host alone, as OneFlow's helpers' are.
class RowHelper {
 public:
  RowHelper(int32_t heads, int32_t queries) : heads_(heads), queries_(queries) {}
  RowHelper(const RowHelper& other) : heads_(other.heads_), queries_(other.queries_) {}
  KERNELS_HD int32_t mask_row(int32_t row) const { return row / (heads_ * queries_) * queries_ + row % queries_; }
  KERNELS_HD int32_t head(int32_t row) const { return row / queries_ % heads_; }

 private:
  int32_t heads_, queries_;
};

// ---- loads for softmax ----

template <typename SRC, typename DST>
struct ScaleMaskLoad {
  using LoadType = DST;
  ScaleMaskLoad(const SRC* src, const bool* mask, int64_t row_size, DST fill, DST scale)
      : src(src), mask(mask), row_size(row_size), fill(fill), scale(scale) {}
  template <int N>
  KERNELS_HD void load(DST* dst, int64_t row, int64_t col) {
    const auto x = get<N>(src + row * row_size + col);
    const auto keep = get<N>(mask + row * row_size + col);
    for (int i = 0; i < N; ++i) dst[i] = keep.elem[i] ? k::convert<DST>(x.elem[i]) * scale : fill;
  }
  const SRC* src;
  const bool* mask;
  int64_t row_size;
  DST fill, scale;
};

// (x + bias of the head) * scale, where the mask that heads share is set.
template <typename SRC, typename DST>
struct BroadcastBiasMaskLoad {
  using LoadType = DST;
  BroadcastBiasMaskLoad(const SRC* src, const SRC* bias, const bool* mask, int64_t row_size, RowHelper helper, DST fill,
                        DST scale)
      : src(src), bias(bias), mask(mask), row_size(row_size), helper(helper), fill(fill), scale(scale) {}
  template <int N>
  KERNELS_HD void load(DST* dst, int32_t row, int32_t col) {
    const auto x = get<N>(src + row * row_size + col);
    const auto b = get<N>(bias + helper.head(row) * row_size + col);
    const auto keep = get<N>(mask + helper.mask_row(row) * row_size + col);
    for (int i = 0; i < N; ++i)
      dst[i] = keep.elem[i] ? (k::convert<DST>(x.elem[i]) + k::convert<DST>(b.elem[i])) * scale : fill;
  }
  const SRC* src;
  const SRC* bias;
  const bool* mask;
  int64_t row_size;
  RowHelper helper;
  DST fill, scale;
};

// Lower triangle of matrices of `rows` rows.
template <typename SRC, typename DST>
struct TrilLoad {
  TrilLoad(const SRC* src, int64_t rows, int64_t row_size, int64_t diagonal, DST fill)
      : src(src), rows(rows), row_size(row_size), diagonal(diagonal), fill(fill) {}
  template <int N>
  KERNELS_HD void load(DST* dst, int64_t row, int64_t col) const {
    const auto x = get<N>(src + row * row_size + col);
    for (int i = 0; i < N; ++i) dst[i] = col + i <= row % rows + diagonal ? k::convert<DST>(x.elem[i]) : fill;
  }
  const SRC* src;
  int64_t rows, row_size, diagonal;
  DST fill;
};

// ---- stores for softmax ----

// Writes the probabilities, and what dropout leaves of them plus what is there already.
template <typename SRC, typename DST>
struct DropoutAddStore {
  DropoutAddStore(DST* dst, DST* softmax_y, const bool* mask, int64_t row_size, SRC scale)
      : dst(dst), softmax_y(softmax_y), mask(mask), row_size(row_size), scale(scale) {}
  template <int N>
  KERNELS_HD void store(const SRC* src, int64_t row, int64_t col) {
    const int64_t at = row * row_size + col;
    const auto keep = get<N>(mask + at);
    auto sum = get<N>(dst + at);
    Word<DST, N> y;
    for (int i = 0; i < N; ++i) {
      y.elem[i] = k::convert<DST>(src[i]);
      sum.elem[i] = k::convert<DST>(k::convert<SRC>(sum.elem[i]) + (keep.elem[i] ? src[i] * scale : SRC(0)));
    }
    put<N>(softmax_y + at, y);
    put<N>(dst + at, sum);
  }
  DST* dst;
  DST* softmax_y;
  const bool* mask;
  int64_t row_size;
  SRC scale;
};

// Numbers the packs that a thread has stored.
struct NumberingStore {
  NumberingStore(int32_t* order, int64_t row_size) : order(order), row_size(row_size) {}
  template <int N>
  KERNELS_HD void store(const float* src, int64_t row, int64_t col) {
    for (int i = 0; i < N; ++i) order[row * row_size + col + i] = src[i] >= 0 ? stored : -1;
    ++stored;
  }
  int32_t* order;
  int64_t row_size;
  int32_t stored = 0;
};

// ---- norms ----

// x + bias + residual, which replaces the residual: right only where it is evaluated once.
template <typename SRC, typename DST>
struct SkipInPlaceLoad {
  using LoadType = DST;
  SkipInPlaceLoad(const SRC* src, const SRC* bias, SRC* residual, int64_t row_size)
      : src(src), bias(bias), residual(residual), row_size(row_size) {}
  template <int N>
  KERNELS_HD void load(DST* dst, int32_t row, int32_t col) const {
    using C = k::compute_t<SRC>;
    const int64_t at = row * row_size + col;
    const auto x = get<N>(src + at);
    const auto b = get<N>(bias + col);
    auto r = get<N>(residual + at);
    for (int i = 0; i < N; ++i) {
      r.elem[i] = k::convert<SRC>(k::convert<C>(x.elem[i]) + k::convert<C>(b.elem[i]) + k::convert<C>(r.elem[i]));
      dst[i] = k::convert<DST>(r.elem[i]);
    }
    put<N>(residual + at, r);
  }
  const SRC* src;
  const SRC* bias;
  SRC* residual;
  int64_t row_size;
};

template <typename SRC, typename DST>
struct AffineStore {
  AffineStore(DST* y, int64_t row_size, const DST* gamma, const DST* beta)
      : y(y), row_size(row_size), gamma(gamma), beta(beta) {}
  template <int N>
  KERNELS_HD void store(const SRC* src, int64_t row, int64_t col) {
    const auto g = get<N>(gamma + col), b = get<N>(beta + col);
    Word<DST, N> out;
    for (int i = 0; i < N; ++i)
      out.elem[i] = k::convert<DST>(src[i] * k::convert<SRC>(g.elem[i]) + k::convert<SRC>(b.elem[i]));
    put<N>(y + row * row_size + col, out);
  }
  DST* y;
  int64_t row_size;
  const DST* gamma;
  const DST* beta;
};

// Group norm, channels first: a pack has one channel's gamma and beta, and must not reach into the next channel.
template <typename SRC, typename DST>
struct ChannelsFirstStore {
  ChannelsFirstStore(DST* y, int64_t row_size, int64_t channels, int64_t spatial, const DST* gamma, const DST* beta)
      : y(y), row_size(row_size), channels(channels), spatial(spatial), gamma(gamma), beta(beta) {}
  template <int N>
  KERNELS_HD void store(const SRC* src, int64_t row, int64_t col) {
    const int64_t at = row * row_size + col, channel = at / spatial % channels;
    const SRC g = k::convert<SRC>(gamma[channel]), b = k::convert<SRC>(beta[channel]);
    Word<DST, N> out;
    for (int i = 0; i < N; ++i) out.elem[i] = k::convert<DST>(src[i] * g + b);
    put<N>(y + at, out);
  }
  bool CanPackAs(size_t pack_size) { return spatial % int64_t(pack_size) == 0; }
  DST* y;
  int64_t row_size, channels, spatial;
  const DST* gamma;
  const DST* beta;
};

// Group norm, channels last: element (row, col) of batch row / groups is at the channels row % groups, in steps of all
// channels.
template <class T>
struct ChannelsLast {
  ChannelsLast(int64_t spatial, int64_t channels, int64_t groups)
      : spatial(int32_t(spatial)), groups(int32_t(groups)), each(int32_t(channels / groups)) {}
  KERNELS_HD int64_t channel(int32_t row, int32_t col) const { return row % groups * each + col % each; }
  KERNELS_HD int64_t at(int32_t row, int32_t col) const {
    return (int64_t(row / groups) * spatial + col / each) * groups * each + channel(row, col);
  }
  bool CanPackAs(size_t pack_size) { return each % int32_t(pack_size) == 0; }
  int32_t spatial, groups, each;
};
template <typename SRC, typename DST>
struct ChannelsLastLoad : ChannelsLast<SRC> {
  using LoadType = DST;
  ChannelsLastLoad(const SRC* src, int64_t spatial, int64_t channels, int64_t groups)
      : ChannelsLast<SRC>(spatial, channels, groups), src(src) {}
  template <int N>
  KERNELS_HD void load(DST* dst, int32_t row, int32_t col) const {
    const auto x = get<N>(src + this->at(row, col));
    for (int i = 0; i < N; ++i) dst[i] = k::convert<DST>(x.elem[i]);
  }
  const SRC* src;
};
template <typename SRC, typename DST>
struct ChannelsLastStore : ChannelsLast<DST> {
  ChannelsLastStore(DST* y, const DST* gamma, const DST* beta, int64_t spatial, int64_t channels, int64_t groups)
      : ChannelsLast<DST>(spatial, channels, groups), y(y), gamma(gamma), beta(beta) {}
  template <int N>
  KERNELS_HD void store(const SRC* src, int32_t row, int32_t col) {
    const auto g = get<N>(gamma + this->channel(row, col)), b = get<N>(beta + this->channel(row, col));
    Word<DST, N> out;
    for (int i = 0; i < N; ++i)
      out.elem[i] = k::convert<DST>(src[i] * k::convert<SRC>(g.elem[i]) + k::convert<SRC>(b.elem[i]));
    put<N>(y + this->at(row, col), out);
  }
  DST* y;
  const DST* gamma;
  const DST* beta;
};

// To int8 with a scale for all.
template <typename SRC>
struct QuantStore {
  QuantStore(int8_t* y, int64_t row_size, float scale) : y(y), row_size(row_size), scale(scale) {}
  template <int N>
  KERNELS_HD void store(const SRC* src, int64_t row, int64_t col) {
    Word<int8_t, N> out;
    for (int i = 0; i < N; ++i) out.elem[i] = k::convert<int8_t>(static_cast<float>(src[i]) * scale);
    put<N>(y + row * row_size + col, out);
  }
  int8_t* y;
  int64_t row_size;
  const float scale;
};

}  // namespace flow
}  // namespace test
