// Products with some tokens on tensor cores: weights of 16 bits go straight from memory into mma fragments.
//
// A fragment's k may be in any order that weights and inputs share. So a lane reads 16 bytes, eight neighbouring k, of rows g
// and g + 8 of the weights and of token g, and hands them to two mma in the order in which they come: no shared memory and no
// shuffles stand between memory and the tensor core. The warps of a block share K.
#pragma once

#include "../arch/sm80.cuh"
#include "gemv.cuh"

KERNELS_BEGIN
namespace detail {

// The 16-bit type of weights that need no decoding, or void.
template <class W>
struct TensorType {
  using type = void;
};
template <Cache kCache>
struct TensorType<DirectLoad<half, float, kCache>> {
  using type = half;
};
template <Cache kCache>
struct TensorType<DirectLoad<bfloat16, float, kCache>> {
  using type = bfloat16;
};
template <class S, int kParts>
struct TensorType<Stacked<S, kParts>> : TensorType<S> {};
template <class A, class B>
struct TensorType<Gated<A, B>> {
  using type = std::conditional_t<std::is_same<typename TensorType<A>::type, typename TensorType<B>::type>::value, typename TensorType<A>::type, void>;
};
template <class W>
using tensor_type = typename TensorType<W>::type;

// Eight values of a row as four words of pairs: as they lie in memory when they are of type T there, otherwise rounded to it.
template <class T, class S>
__device__ __forceinline__ void pairs_of(uint32_t (&words)[4], const S& source, const Fetched<S, 8>& fetched, int64_t row, int col) {
  if constexpr (std::is_same<tensor_type<S>, T>::value) {
    memcpy(words, &fetched, sizeof(words));
  } else {
    const Pack<T, 8> rounded = convert<T>(resolve(source, fetched, row, col));
    memcpy(words, rounded.v, sizeof(words));
  }
}

// kTokens: of the block, a multiple of 8.
template <class P, int kTokens>
struct SkinnyBody {
  using T = tensor_type<typename P::W>;
  using X = typename P::X;
  static constexpr int max_threads = 256;
  static constexpr int registers = 128;
  static constexpr int kRows = 16, kTiles = kTokens / 8;
  static constexpr int kStep = 64;  // columns a warp takes in at a time: a cache line of every row
  struct Params {
    P problem;
  };

  static __device__ __forceinline__ void run(const Params& params) {
    extern __shared__ float partial[];  // warps x matrices x kRows x kTokens
    const P& p = params.problem;
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int64_t row = int64_t(blockIdx.x) * kRows, token = int64_t(blockIdx.y) * kTokens;
    __shared__ Alone<TokenState<X>, kTokens> states;
    find_states<8>(states.items, p.x, token, kTokens, p.m, p.k, blockIdx.x == 0);
    float sums[P::matrices][kTiles][4] = {};
    for (int col = warp * kStep; col < p.k; col += warps * kStep) add_step(p, row, token, col, states.items, sums);

    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    float* mine = partial + warp * (P::matrices * kRows * kTokens);
    KERNELS_UNROLL
    for (int i = 0; i < P::matrices; ++i) {
      KERNELS_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        KERNELS_UNROLL
        for (int j = 0; j < 4; ++j) {
          mine[(i * kTokens + tile * 8 + 2 * t + j % 2) * kRows + g + j / 2 * 8] = sums[i][tile][j];
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kTokens; i += blockDim.x) {
      const int64_t result_token = token + i / kRows, output = row + i % kRows;
      if (result_token >= p.m || output >= p.n) continue;
      const Result<P> result(p, result_token, output);
      float totals[P::matrices] = {};
      for (int w = 0; w < warps; ++w) {
        KERNELS_UNROLL
        for (int j = 0; j < P::matrices; ++j) totals[j] += partial[(w * P::matrices + j) * kRows * kTokens + i];
      }
      result.put_sums(totals);
    }
  }

 private:
  // Rows and tokens beyond the end are read as the last ones, columns beyond the end count as zeros.
  static __device__ __forceinline__ void add_step(const P& p, int64_t row, int64_t token, int col, const TokenState<X>* states, float (&sums)[P::matrices][kTiles][4]) {
    constexpr int kPacks = kStep / 32;  // of a lane, for each row
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    const auto row_at = [&](int i) { return lesser(row + g + 8 * i, p.n - 1); };
    const auto col_at = [&](int i) { return col + i * 32 + t * 8; };
    const auto within = [&](int i) { return col_at(i) < p.k; };
    const auto fetch_weights = [&](auto& fetched, const auto& w) {
      KERNELS_UNROLL
      for (int i = 0; i < kPacks; ++i) {
        KERNELS_UNROLL
        for (int j = 0; j < 2; ++j) {
          if (within(i)) fetched[i][j] = fetch<8>(w, row_at(j), col_at(i));
        }
      }
    };
    Fetched<std::decay_t<decltype(p.template weights<0>())>, 8> first[kPacks][2] = {};
    Fetched<std::decay_t<decltype(p.template weights<P::matrices - 1>())>, 8> second[P::matrices == 2 ? kPacks : 1][2] = {};
    fetch_weights(first, p.template weights<0>());
    if constexpr (P::matrices == 2) fetch_weights(second, p.template weights<1>());
    KERNELS_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      const int64_t mine = lesser(token + tile * 8 + g, p.m - 1);
      KERNELS_UNROLL
      for (int i = 0; i < kPacks; ++i) {
        uint32_t x[4] = {};
        if (within(i)) pairs_of<T>(x, states[int(mine - token)].bind(p.x), fetch<8>(p.x, mine, col_at(i)), mine, col_at(i));
        multiply(sums[0][tile], p.template weights<0>(), first[i], x, row_at(0), row_at(1), col_at(i));
        if constexpr (P::matrices == 2) multiply(sums[1][tile], p.template weights<1>(), second[i], x, row_at(0), row_at(1), col_at(i));
      }
    }
  }

  template <class W, class F>
  static __device__ __forceinline__ void multiply(float (&sum)[4], const W& w, const F (&fetched)[2], const uint32_t (&x)[4], int64_t row, int64_t row_8, int col) {
    uint32_t upper[4], lower[4];
    pairs_of<T>(upper, w, fetched[0], row, col);
    pairs_of<T>(lower, w, fetched[1], row_8, col);
    KERNELS_UNROLL
    for (int i = 0; i < 4; i += 2) {
      const uint32_t a[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]}, b[2] = {x[i], x[i + 1]};
      arch::mma_16816<T>(sum, a, b);
    }
  }
};

}  // namespace detail
KERNELS_END
