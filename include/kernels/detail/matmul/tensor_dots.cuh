// Dot products on tensor cores, for products with few tokens: weights of 16, 8 or 4 bits are decoded to pairs of 16
// bits, and mma replaces the multiplications of CUDA cores.
//
//   a row of weights:  | piece 0 | piece 1 | ... | piece 7 |    lanes 4g to 4g + 3 read piece g, 16 bytes each
//
//     A: weights             B: inputs                     C: sums
//     row g     = piece g    column g = the inputs         (g, g)      is of the first row of weights
//     row g + 8 = piece g    that belong to piece g        (g + 8, g)  is of the second one; all others are not used
//                 of a second row of weights
//
// Memory is fastest when whole rows are read, but mma takes operands of 16 rows. So the rows of A are pieces of one row
// of weights, and only the diagonals of C are used. The tensor cores have time for that, as the kernel is memory-bound.
//
// The k of a fragment may be in any order that weights and inputs share, so a lane's 16 bytes are operands of several
// mma without shuffles. A piece's scale is applied to its sums. What rounding the inputs to 16 bits removes is
// multiplied in a second pass.
#pragma once

#include "../dequantize.cuh"
#include "gemv.cuh"

KERNELS_BEGIN
namespace detail {

// N values of a row as pairs of T: as they are in memory if they are of type T, otherwise rounded. With `rest`, the
// rounding errors, where these are finite.
template <class S, int N>
struct FetchedRow {
  static constexpr int width = pack_within<S, N>;
  Fetched<S, width> packs[N / width];

  __device__ __forceinline__ void fetch_from(const S& source, int64_t row, int col) {
    KERNELS_UNROLL
    for (int i = 0; i < N; i += width) packs[i / width] = fetch<width>(source, row, col + i);
  }
  template <class T>
  __device__ __forceinline__ void put_pairs(uint32_t (&words)[N / 2], const S& source, int64_t row, int col,
                                            bool rest) const {
    KERNELS_UNROLL
    for (int i = 0; i < N; i += width) {
      const auto& fetched = packs[i / width];
      if constexpr (std::is_same<tensor_type<S>, T>::value) {
        memcpy(words + i / 2, &fetched, width * 2);
      } else {
        const auto values = convert<float>(resolve(source, fetched, row, col + i));
        Pack<T, width> rounded = convert<T>(values);
        if (rest)
          rounded =
              convert<T>(transform(values - convert<float>(rounded), [](float x) { return x - x == 0.f ? x : 0.f; }));
        memcpy(words + i / 2, rounded.v, width * 2);
      }
    }
  }
};
template <class T, int N, class S>
__device__ __forceinline__ void read_pairs(uint32_t (&words)[N / 2], const S& source, int64_t row, int col, bool rest) {
  FetchedRow<S, N> fetched;
  fetched.fetch_from(source, row, col);
  fetched.template put_pairs<T>(words, source, row, col, rest);
}

// Whether 64 bytes of codes have several scales.
template <class W>
bool has_fine_scales(const W& w) {
  if constexpr (is_stacked<W>::value) return w.any([](const auto& part) { return has_fine_scales(part); });
  else if constexpr (is_paired<W>::value) return has_fine_scales(w.source());
  else return w.scales().group(4 * Coded<W>::pack) < 4 * Coded<W>::pack;
}

// The codes of a pack as they are in memory.
template <class W, class Fetched>
__device__ __forceinline__ void read_codes(uint32_t (&words)[4], const Fetched& fetched) {
  if constexpr (Coded<W>::scaled) memcpy(words, &fetched.codes, sizeof(words));
  else memcpy(words, &fetched, sizeof(words));
}

// The dot products of R rows of each matrix with M tokens.
template <class P, int R, int M>
struct TensorDots {
  using X = typename P::X;
  using W = typename P::W;
  using T = meeting_type<X, W>;
  using Code = typename Coded<W>::Code;
  static constexpr int pack = Coded<W>::pack, rows = R, tokens = M, max_threads = 256;
  static constexpr int step = 32 * pack;
  static constexpr bool few_warps = pack >= 32;
  template <class Weights, int U>
  using Rows = GemvRows<Weights, pack, R, U, true>;
  static constexpr bool coded = !is_16_bit<Code>, scaled = Coded<W>::scaled;
  static constexpr bool exact = std::is_same<tensor_type<X>, T>::value;  // inputs need no rounding
  // Few, for occupancy: 4096 x 14336 took 10.3 us with 64 and 12.5 with 72 or 80 (one token, 4 bits), 28.9 and 30.4
  // with 128 (two tokens, 16 bits).
  static constexpr int registers = M == 1 || (!coded && exact) ? 64 : 128;
  static constexpr int kEach = coded ? pack / 4 : 8;  // codes that are decoded together: those of a word
  static constexpr int kBlocks = pack / kEach;
  static constexpr int kAll = P::matrices * R, kPairs = kAll / 2;
  static_assert(kAll % 2 == 0, "rows go in pairs");
  float sums[M][kPairs][4] = {};
  static constexpr int bytes_of_warp = 0;
  __device__ __forceinline__ TensorDots(unsigned char*, const GemvTokens<P, M>&, int) {}

  static __device__ __forceinline__ unsigned first_row() { return 0; }
  template <class Some>
  static __device__ __forceinline__ void prefetch(Some& rows, int u, int begin, int end) {
    rows.prefetch(u, begin + int(threadIdx.x & 31) * pack, end);
  }
  static constexpr int pieces = 1;

  template <class First, class Second>
  __device__ __forceinline__ void add(const First& first, const Second& second, int u, const GemvTokens<P, M>& of,
                                      int begin) {
    const int col = begin + int(threadIdx.x & 31) * pack, cols = int(of.p.k);
    uint32_t codes[kAll][4];
    float scales[kAll], zeros[kAll];
    // Lanes beyond the end have not read a scale: they take that of the piece's first lane.
    const auto from_first = [](float x) { return __shfl_sync(0xffffffffu, x, threadIdx.x & 28); };
    KERNELS_UNROLL
    for (int i = 0; i < kAll; ++i) {
      const auto& row = i < R ? first.rows[i % R] : second.rows[i % R];
      const auto& fetched = i < R ? first.fetched[u][i % R] : second.fetched[u][i % R];
      read_codes<W>(codes[i], fetched);
      if constexpr (scaled) {
        scales[i] = row.source.scale_of(fetched);
        if constexpr (has_zeros<typename First::Source>)
          zeros[i] = from_first(row.source.scales().zero(fetched.scales));
      }
    }
    float some[M][kPairs][4] = {};  // sums that are not yet scaled
    KERNELS_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t weights[kAll][kEach / 2];
      KERNELS_UNROLL
      for (int i = 0; i < kAll; ++i) {
        if constexpr (!coded) memcpy(weights[i], codes[i], sizeof(weights[i]));
        else if constexpr (has_zeros<typename First::Source>)
          Decoder<Code>::template pairs<T>(weights[i], codes[i][block], zeros[i]);
        else Decoder<Code>::template pairs<T>(weights[i], codes[i][block], Nothing{});
      }
      KERNELS_UNROLL
      for (int m = 0; m < M; ++m) {
        KERNELS_UNROLL
        for (int rest = 0; rest < (exact ? 1 : 2); ++rest) {
          uint32_t x[kEach / 2] = {};
          if (col < cols) read_pairs<T, kEach>(x, of.source(m), of.row(m), col + block * kEach, rest == 1);
          order_pairs<Code>(x);
          multiply(scaled ? some[m] : sums[m], weights, x);
        }
      }
    }
    if constexpr (scaled) {
      KERNELS_UNROLL
      for (int i = 0; i < kAll; ++i) {
        const float scale = from_first(scales[i]);
        KERNELS_UNROLL
        for (int m = 0; m < M; ++m) {
          KERNELS_UNROLL
          for (int j = i % 2 * 2; j < i % 2 * 2 + 2; ++j)
            sums[m][i / 2][j] = fma(some[m][i / 2][j], scale, sums[m][i / 2][j]);
        }
      }
    }
  }
  template <class To>
  __device__ __forceinline__ void share(To& to) const {
    const int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    share_parts<kAll * M>(to, [&](int at) {
      const int i = at / (M * R) * R + at % R;
      const float (&mine)[4] = sums[at / R % M][i / 2];
      return g / 2 != t ? 0.f : g % 2 == 0 ? mine[i % 2 * 2] : mine[i % 2 * 2 + 1];
    });
  }

 private:
  static __device__ __forceinline__ void multiply(float (&to)[kPairs][4], const uint32_t (&weights)[kAll][kEach / 2],
                                                  const uint32_t (&x)[kEach / 2]) {
    KERNELS_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const auto& upper = weights[2 * pair];
      const auto& lower = weights[2 * pair + 1];
      KERNELS_UNROLL
      for (int i = 0; i < kEach / 2; i += 2) {
        const uint32_t a[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]}, b[2] = {x[i], x[i + 1]};
        arch::mma_16816<T>(to[pair], a, b);
      }
    }
  }
};

// The same for weights with several scales in 64 bytes of codes. The rows of the mma are rows of weights, upper and
// lower ones; lanes 4g to 4g + 3 read 64 bytes of row g, and each lane's bytes have one scale. Column t of the other
// operand has the inputs for lane t's bytes and zeros elsewhere, so each column of sums has one scale. Columns 4 to 7
// are a second token. An infinite code, which some 8-bit types have, makes the result NaN, as it is also multiplied by
// these zeros.
//
// A warp copies the inputs of its columns to shared memory, followed by zeros for the lanes that need zeros: each lane
// then reads from one address. An alternative multiplied codes as halves without the right exponent, as they are in
// memory, and their excess separately: 20 % fewer instructions, but longer, as the time of the tensor cores counts.
template <class P, int M>
struct FineDots {
  using X = typename P::X;
  using W = typename P::W;
  using T = meeting_type<X, W>;
  using Code = typename Coded<W>::Code;
  static_assert(M <= 2, "eight columns");
  static constexpr int pack = Coded<W>::pack, rows = 16 / P::matrices, tokens = M, max_threads = 512;
  static constexpr int kEach = pack / 4;
  static constexpr int kHalf = 4 * pack, step = 2 * kHalf;  // 128 bytes of a row: memory is slower with less
  static constexpr bool few_warps = true;
  static constexpr int registers = 72;
  static constexpr bool exact = std::is_same<tensor_type<X>, T>::value;
  static constexpr int kMine = 2 / P::matrices;  // rows of a matrix that a lane reads
  static constexpr int kRounds = exact ? 1 : 2;  // the inputs, and their rounding errors
  static constexpr int kInputs = step / 32;      // of a token, that a lane copies
  template <class Weights, int U>
  using Rows = GemvRows<Weights, pack, kMine, U, false, 8>;
  static constexpr int pieces = 2;

  // Shared memory of a warp, for each round: inputs, and zeros, which lanes read from other banks than those that read
  // inputs at the same time. A block has no more than its warps need, as the rest is left to other blocks, and to the
  // L1, which has the scales (int4 with a scale for 32 columns, one token: 27648 x 2048 11.8 us, with room for 16 warps
  // 20.6; 128256 x 2048 43 and 68).
  static constexpr int kZeros = (M * step + 2 * kEach) * 2, kRound = kZeros + step * 2,
                       bytes_of_warp = kRounds * kRound;
  static_assert(bytes_of_warp % 16 == 0, "each warp's begin at a multiple of 16 bytes");

  // Inputs are loaded a step ahead.
  __device__ __forceinline__ FineDots(unsigned char* inputs, const GemvTokens<P, M>& of, int begin) : inputs_(inputs) {
    fetch_inputs(of, begin);
    const Words zeros = {};
    KERNELS_UNROLL
    for (int round = 0; round < kRounds; ++round) put(round, kZeros + lane() * kInputs * 2, zeros);
  }

  static __device__ __forceinline__ unsigned first_row() { return lane() / 4; }
  // Lanes beyond the end read the last codes again, and multiply them by zeros.
  template <class Some>
  static __device__ __forceinline__ void prefetch(Some& rows, int u, int begin, int end) {
    rows.prefetch(u, greater(0, lesser(begin + u % 2 * kHalf + int(lane() & 3) * pack, end - pack)), end);
  }

  template <class First, class Second>
  __device__ __forceinline__ void add(const First& first, const Second& second, int u, const GemvTokens<P, M>& of,
                                      int begin) {
    const int g = lane() / 4, t = lane() & 3, half = u % 2;
    if (half == 0) {
      put_inputs(of, begin);
      fetch_inputs(of, begin + int(blockDim.x / 32) * step);
    }
    const int mine = g % 4 == t && g / 4 < M ? (g / 4 * step + t * pack) * 2 : kZeros;
    const auto& fetched_upper = first.fetched[u][0];
    const auto& fetched_lower = (P::matrices == 2 ? second : first).fetched[u][kMine - 1];
    const auto& source_upper = first.rows[0].source;
    const auto& source_lower = (P::matrices == 2 ? second : first).rows[kMine - 1].source;
    uint32_t codes[2][4];
    read_codes<W>(codes[0], fetched_upper);
    read_codes<W>(codes[1], fetched_lower);
    float some[2][4] = {};  // two, as an mma waits for the preceding one that adds to the same sums
    KERNELS_UNROLL
    for (int block = 0; block < 4; ++block) {
      uint32_t weights[2][kEach / 2];
      Decoder<Code>::template pairs<T>(weights[0], codes[0][block], zero_of(source_upper, fetched_upper));
      Decoder<Code>::template pairs<T>(weights[1], codes[1][block], zero_of(source_lower, fetched_lower));
      KERNELS_UNROLL
      for (int round = 0; round < kRounds; ++round) {
        uint32_t x[kEach / 2];
        memcpy(
            x,
            __builtin_assume_aligned(inputs_ + round * kRound + mine + (half * kHalf + block * kEach) * 2, 2 * kEach),
            sizeof(x));
        order_pairs<Code>(x);
        KERNELS_UNROLL
        for (int i = 0; i < kEach / 2; i += 2) {
          const uint32_t a[4] = {weights[0][i], weights[1][i], weights[0][i + 1], weights[1][i + 1]},
                         b[2] = {x[i], x[i + 1]};
          arch::mma_16816<T>(some[kEach == 8 ? i / 2 : block % 2], a, b);
        }
      }
    }
    const bool beyond = begin + half * kHalf + t * pack >= int(of.p.k);
    const float scales[2] = {beyond ? 0.f : source_upper.scale_of(fetched_upper),
                             beyond ? 0.f : source_lower.scale_of(fetched_lower)};
    KERNELS_UNROLL
    for (int j = 0; j < 4; ++j) {
      sums_[j] = fma(some[0][j] + some[1][j],
                     __shfl_sync(0xffffffffu, scales[j / 2], (lane() & 28) + t % 2 * 2 + j % 2), sums_[j]);
    }
    if (half == 1) __syncwarp();
  }
  template <class To>
  __device__ __forceinline__ void share(To& to) const {
    const int g = lane() / 4, t = lane() & 3;
    KERNELS_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float some = sums_[2 * i] + sums_[2 * i + 1], sum = some + __shfl_xor_sync(0xffffffffu, some, 1);
      if (t % 2 == 0 && t / 2 < M)
        to.put(P::matrices == 2 ? (i * M + t / 2) * rows + g : t / 2 * rows + 8 * i + g, sum);
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return int(threadIdx.x & 31); }

  using Words = uint32_t[kInputs / 2];
  __device__ __forceinline__ void put(int round, int at, const Words& words) {
    memcpy(__builtin_assume_aligned(inputs_ + round * kRound + at, sizeof(Words)), words, sizeof(Words));
  }
  __device__ __forceinline__ void fetch_inputs(const GemvTokens<P, M>& of, int begin) {
    const int col = begin + lane() * kInputs;
    KERNELS_UNROLL
    for (int m = 0; m < M; ++m) {
      if (col < int(of.p.k)) ahead_[m].fetch_from(of.source(m), of.row(m), col);
    }
  }
  __device__ __forceinline__ void put_inputs(const GemvTokens<P, M>& of, int begin) {
    const int col = begin + lane() * kInputs;
    KERNELS_UNROLL
    for (int m = 0; m < M; ++m) {
      KERNELS_UNROLL
      for (int round = 0; round < kRounds; ++round) {
        Words words = {};
        if (col < int(of.p.k)) ahead_[m].template put_pairs<T>(words, of.source(m), of.row(m), col, round == 1);
        put(round, (m * step + lane() * kInputs) * 2, words);
      }
    }
    __syncwarp();
  }
  // Nothing if there are no zero points.
  template <class Source, class Fetched>
  static __device__ __forceinline__ auto zero_of(const Source& source, const Fetched& fetched) {
    if constexpr (has_zeros<Source>) return source.scales().zero(fetched.scales);
    else return Nothing{};
  }
  using Bound =
      std::decay_t<decltype(std::declval<const GemvTokens<P, M>&>().source(0))>;  // void for the host compiler
  unsigned char* const inputs_;
  FetchedRow<std::conditional_t<std::is_void<Bound>::value, X, Bound>, kInputs> ahead_[M];
  float sums_[4] = {};
};

}  // namespace detail
KERNELS_END
