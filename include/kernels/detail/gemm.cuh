// Products with many tokens on tensor cores, for sm_80 and up: mma.sync on tiles that cp.async brings into shared memory.
//
// A block makes a tile of 128 tokens x 256 outputs, its 8 warps 64 x 64 each, in steps of 32 columns of K, with three steps under
// way while one is worked on. Operands that are 16-bit and aligned are copied; others are read through their functors,
// rounded to 16 bits and stored. In shared memory a row of a step is four chunks of 16 bytes, permuted so that neither the
// writes nor ldmatrix meet a bank conflict.
#pragma once

#include "tensor_dots.cuh"

KERNELS_BEGIN
namespace detail {

// Where a 16-bit operand stands in memory.
template <class Src, Cache kCache>
__device__ __forceinline__ const Src* address_of(const DirectLoad<Src, float, kCache>& source, int64_t row, int64_t col) {
  return source.at(row, col);
}
template <class S, int kParts>
__device__ __forceinline__ auto address_of(const Stacked<S, kParts>& source, int64_t row, int64_t col) {
  return source.visit(row, [&](const S& part, int64_t begin) { return address_of(part, row - begin, col); });
}

// One operand of a block's tile: kRows rows, of which row_of(i) says the number in the source (or -1 for none) and source_of(i)
// the source. kWidth: elements per access where it is not copied.
template <class T, class Source, int kRows, int kThreads, int kWidth>
struct TileLoader {
  static constexpr int kChunks = 4, kEach = kRows * kChunks / kThreads;
  static constexpr bool copied = kWidth == 8 && std::is_same<tensor_type<Source>, T>::value;
  using Part = Fetched<Source, kWidth>;
  struct Waiting {
    Part parts[copied ? 1 : kEach][copied ? 1 : 8 / kWidth];
  };

  static __device__ __forceinline__ int slot(int row, int chunk) { return row * kChunks + (chunk ^ (row / 2 % kChunks)); }

  // Asks for a step's columns, from `col` on.
  template <class Which>
  static __device__ __forceinline__ void ask(Waiting& waiting, uint32_t shared, const Which& which, int col, int end) {
    KERNELS_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int index = i * kThreads + threadIdx.x, tile_row = index / kChunks, chunk = index % kChunks;
      const int at = col + chunk * 8;
      which(tile_row, [&](const Source& source, int64_t row, bool there) {
        if constexpr (copied) {
          const int left = there ? end - at : 0;
          arch::copy_async_16(shared + slot(tile_row, chunk) * 16, address_of(source, row, left > 0 ? at : 0), left <= 0 ? 0 : left < 8 ? 2 * left : 16);
        } else {
          KERNELS_UNROLL
          for (int j = 0; j < 8 / kWidth; ++j) {
            if (there && at + j * kWidth < end) waiting.parts[i][j] = fetch<kWidth>(source, row, at + j * kWidth);
          }
        }
      });
    }
  }
  // Stores what was asked for and is not copied.
  template <class Which>
  static __device__ __forceinline__ void place(const Waiting& waiting, ::uint4* shared, const Which& which, int col, int end) {
    if constexpr (!copied) {
      KERNELS_UNROLL
      for (int i = 0; i < kEach; ++i) {
        const int index = i * kThreads + threadIdx.x, tile_row = index / kChunks, chunk = index % kChunks;
        const int at = col + chunk * 8;
        which(tile_row, [&](const Source& source, int64_t row, bool there) {
          Pack<T, 8> values;
          KERNELS_UNROLL
          for (int j = 0; j < 8 / kWidth; ++j) {
            Pack<T, kWidth> some = broadcast<kWidth>(convert<T>(0.f));
            if (there && at + j * kWidth < end) some = convert<T>(resolve(source, waiting.parts[i][j], row, at + j * kWidth));
            KERNELS_UNROLL
            for (int k = 0; k < kWidth; ++k) values.v[j * kWidth + k] = some.v[k];
          }
          memcpy(&shared[slot(tile_row, chunk)], values.v, 16);
        });
      }
    }
  }
};

template <class P, class T, int kWidth>
struct GemmBody {
  using X = typename P::X;
  using Gate = std::decay_t<decltype(std::declval<const P&>().template weights<0>())>;
  static_assert(P::matrices == 1 || std::is_same<Gate, std::decay_t<decltype(std::declval<const P&>().template weights<P::matrices - 1>())>>::value,
                "gated weights of two types: use two products");
  static constexpr int max_threads = 256, registers = 255;
  static constexpr int kTokens = 128, kRows = 256, kStep = 32, kStages = starts_normed<X> ? 3 : 4;
  static constexpr int kOutputs = kRows / P::matrices;
  static constexpr int kStageBytes = (kTokens + kRows) * kStep * 2;
  static constexpr int kStaged = 64 + 4;  // floats in a row of what a warp hands to the sink
  static constexpr int shared_bytes = kStages * kStageBytes;
  using Inputs = TileLoader<T, X, kTokens, max_threads, kWidth>;
  using Weights = TileLoader<T, Gate, kRows, max_threads, kWidth>;
  struct Params {
    P problem;
    int64_t token_tiles, output_tiles;
    bool wide_out;  // whether the sink takes packs of 8
  };

  static __device__ __forceinline__ void run(const Params& params) {
    extern __shared__ __align__(16) unsigned char stages[];
    const P& p = params.problem;
    const Tile tile = place_tile(params);
    const int64_t token = tile.token, output = tile.output;
    if (token >= tile.token_end) return;
    __shared__ Alone<TokenState<X>, kTokens> states;
    find_states<kWidth>(states.items, p.x, token, kTokens, tile.token_end, p.k, tile.output == 0);
    const int columns = int(p.k), steps = (columns + kStep - 1) / kStep;
    const auto input = [&](int i, const auto& f) {
      const bool there = token + i < tile.token_end;
      f(states.items[i].bind(p.x), there ? token + i : 0, there);
    };
    // With a gate, each run of 64 rows is 32 of one matrix and the same 32 of the other: a warp has both.
    const auto weight = [&](int i, const auto& f) {
      const int64_t n = output + (P::matrices == 1 ? i : i / 64 * 32 + i % 32);
      const bool there = n < p.n;
      if constexpr (P::matrices == 2) {
        if (i % 64 >= 32) return f(p.template weights<1>(), tile.weights + (there ? n : 0), there);
      }
      f(p.template weights<0>(), tile.weights + (there ? n : 0), there);
    };
    typename Inputs::Waiting inputs;
    typename Weights::Waiting weights;
    const auto stage = [&](int step) { return stages + step % kStages * kStageBytes; };
    const auto ask = [&](int step) {
      if (step < steps) {
        const uint32_t shared = arch::shared_address(stage(step));
        Inputs::ask(inputs, shared, input, step * kStep, columns);
        Weights::ask(weights, shared + kTokens * kStep * 2, weight, step * kStep, columns);
      }
      arch::copy_async_commit();
    };
    const auto place = [&](int step) {
      if (step >= steps) return;
      ::uint4* shared = reinterpret_cast<::uint4*>(stage(step));
      Inputs::place(inputs, shared, input, step * kStep, columns);
      Weights::place(weights, shared + kTokens * kStep * 2 / 16, weight, step * kStep, columns);
    };

    float sums[4][8][4] = {};
    KERNELS_UNROLL
    for (int step = 0; step < kStages - 1; ++step) {
      ask(step);
      place(step);
    }
    for (int step = 0; step < steps; ++step) {
      arch::copy_async_wait<kStages - 2>();
      __syncthreads();
      ask(step + kStages - 1);
      multiply(arch::shared_address(stage(step)), sums);
      place(step + kStages - 1);
    }
    arch::copy_async_wait<0>();
    __syncthreads();
    hand_over(params, tile, sums, reinterpret_cast<float*>(stages));
  }

 private:
  static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 % 2 * 64; }
  static __device__ __forceinline__ int warp_column() { return threadIdx.x / 64 * 64; }

  // Blocks that run at the same time make a compact area, so that they share operands in the L2.
  static __device__ __forceinline__ Tile place_tile(const Params& params) {
    constexpr int64_t kBand = 8;
    const int64_t per_band = kBand * params.output_tiles, band = blockIdx.x / per_band;
    const int64_t height = lesser(kBand, params.token_tiles - band * kBand), within = blockIdx.x - band * per_band;
    return Tile(params.problem, band * kBand + within % height, kTokens, within / height * kOutputs);
  }

  static __device__ __forceinline__ void multiply(uint32_t stage, float (&sums)[4][8][4]) {
    const int lane = threadIdx.x & 31;
    const uint32_t weights = stage + kTokens * kStep * 2;
    KERNELS_UNROLL
    for (int half_step = 0; half_step < kStep / 16; ++half_step) {
      uint32_t x[4][4], w[4][4];
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i) {
        arch::load_matrix_x4(x[i], stage + Inputs::slot(warp_row() + i * 16 + lane % 16, half_step * 2 + lane / 16) * 16);
        arch::load_matrix_x4(w[i], weights + Weights::slot(warp_column() + i * 16 + lane % 8 + lane / 16 * 8, half_step * 2 + lane / 8 % 2) * 16);
      }
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i) {
        KERNELS_UNROLL
        for (int j = 0; j < 8; ++j) {
          const uint32_t b[2] = {w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]};
          arch::mma_16816<T>(sums[i][j], x[i], b);
        }
      }
    }
  }

  // To the sink by way of shared memory, 16 rows of a warp at a time, so that whole rows are written.
  static __device__ __forceinline__ void hand_over(const Params& params, const Tile& tile, const float (&sums)[4][8][4], float* shared) {
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    float* mine = shared + threadIdx.x / 32 * (16 * kStaged);
    KERNELS_UNROLL
    for (int i = 0; i < 4; ++i) {
      KERNELS_UNROLL
      for (int j = 0; j < 8; ++j) {
        float* to = mine + g * kStaged + j * 8 + 2 * t;
        to[0] = sums[i][j][0], to[1] = sums[i][j][1];
        to[8 * kStaged] = sums[i][j][2], to[8 * kStaged + 1] = sums[i][j][3];
      }
      __syncwarp();
      const int64_t row = tile.token + warp_row() + i * 16, col = tile.output + warp_column() / P::matrices;
      if (params.wide_out) put_slab<8>(params.problem, mine, row, tile.token_end, col);
      else put_slab<1>(params.problem, mine, row, tile.token_end, col);
      __syncwarp();
    }
  }

  template <int N>
  static __device__ __forceinline__ void put_slab(const P& p, const float* from, int64_t row, int64_t end, int64_t col) {
    constexpr int kCols = 64 / P::matrices, kPacks = kCols / N;
    const auto map = sink_map(p.out);
    const auto sink = sink_end(p.out);
    for (int i = threadIdx.x & 31; i < 16 * kPacks; i += 32) {
      const int64_t r = row + i / kPacks, c = col + i % kPacks * N;
      if (r >= end || c >= p.n) continue;
      const float* at = from + i / kPacks * kStaged + i % kPacks * N;
      const auto pack = [&](int offset) {
        Pack<float, N> out;
        KERNELS_UNROLL
        for (int j = 0; j < N; ++j) out.v[j] = at[offset + j];
        return out;
      };
      if constexpr (P::matrices == 2) {
        const auto later = later_maps(map);
        put(sink, apply_map(later, first_map(map).join(pack(0), pack(32)), fetch_operands<N>(later, r, c), r, c), r, c);
      } else {
        put(sink, apply_map(map, pack(0), fetch_operands<N>(map, r, c), r, c), r, c);
      }
    }
  }
};

}  // namespace detail
KERNELS_END
