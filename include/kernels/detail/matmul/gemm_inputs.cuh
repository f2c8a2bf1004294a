// How the inputs of a tile get to shared memory if weights come by TMA or are copied as codes: by TMA as well, or by
// producer threads.
#pragma once

#include <cstdint>

#include "../tensor_map.cuh"
#include "product.cuh"
#include "tile_operand.cuh"

KERNELS_BEGIN
namespace detail {

// A position in a ring: stage, and parity of its barriers' phase. advance() moves on by at most the number of stages.
struct PipelineState {
  int stages, stage = 0, parity = 0;
  __device__ __forceinline__ explicit PipelineState(int count) : stages(count) {}
  __device__ __forceinline__ void advance(int further) {
    stage += further;
    if (stage >= stages) stage -= stages, parity ^= 1;
  }
  __device__ __forceinline__ void next() { advance(1); }
  __device__ __forceinline__ int previous() const { return (stage > 0 ? stage : stages) - 1; }
  __device__ __forceinline__ void skip(int further) {
    stage += further;
    parity ^= stage / stages % 2;
    stage %= stages;
  }
};

// Inputs of type T in rows of constant stride, copied by TMA in boxes of 128 bytes of each row. A box with rows that do
// not exist takes longer (129 x 4096 x 4096: 25.5 us instead of 19.6 with 192 tokens). So the last tokens of each group
// have a box of their own; if only the device knows their number, boxes of 16 rows. Rows behind them, stale or of other
// tokens, give results that are not used.
template <class X, class T>
struct InputMaps {
  static constexpr bool possible = in_rows<X, T>;
  arch::TensorMap whole, last;
  int last_tokens;
  bool made = false;

  // For tiles of `tokens` tokens.
  template <class P>
  void make(const Exec& ex, const P& p, int tokens) {
    if constexpr (possible) {
      const bool sizes_known = p.groups.offsets == nullptr;
      const auto& x = without_scales(p.x);
      const int64_t rows = sizes_known ? p.m * p.groups.count : p.m, stride = x.at(1, 0) - x.at(0, 0);
      if (stride == 0 || rows > INT32_MAX) return;
      const MappedRows tensor{x.at(0, 0), int(sizeof(T)), p.k, rows, 1, 1, stride, 0, 0};
      last_tokens = !sizes_known ? 16 : p.m % tokens == 0 ? tokens : int(p.m % tokens);
      made = make_tensor_map(ex, tensor, tokens, whole) && make_tensor_map(ex, tensor, last_tokens, last);
    }
  }
  __device__ __forceinline__ bool are_there() const { return possible && made; }

  // The boxes of a tile's step.
  struct Boxes {
    const arch::TensorMap& map;
    int first, rows, count;
    __device__ __forceinline__ int bytes() const { return count * rows * 128; }
    // By one thread.
    template <bool kSeveral = true>
    __device__ __forceinline__ void copy(uint32_t to, int col, arch::BarrierAddress full) const {
#pragma unroll 1
      for (int i = 0; i < (kSeveral ? count : 1); ++i)
        arch::copy_box(to + i * rows * 128, map, col, first + i * rows, 0, 0, full);
    }
  };
  __device__ __forceinline__ Boxes of_tile(const Tile& tile, int tokens) const {
    const int first = int(tile.token), there = int(lesser<int64_t>(tokens, tile.token_end - tile.token));
    if (there == tokens) return {whole, first, tokens, 1};
    return {last, first, last_tokens, (there + last_tokens - 1) / last_tokens};
  }
};

// kThreads threads load steps of 64 columns, gathered or through functors: every step, or every `turns`-th. A stage's
// barrier counts all of these threads. kMostWaiting: values through functors are loaded a step ahead if they take at
// most this many bytes of a thread's registers.
template <class T, class X, int kTokens, int kThreads, int kMostWaiting = 0>
class InputsByThreads {
 public:
  using Operand = TileOperand<T, X, kTokens, kThreads, 8>;
  static constexpr int kBytes = Operand::kBytes;
  static constexpr bool copied = Operand::copied,
                        waits = !copied && sizeof(typename Operand::Waiting) <= kMostWaiting, ahead = copied || waits;
  template <class P>
  __device__ __forceinline__ InputsByThreads(const P& p, const Tile& tile, const TokenState<X>* states, int first_col,
                                             int turns = 1)
      : rows_{p.x, states, tile.token, tile.token_end},
        cols_(int(p.k)),
        further_(turns * 64),
        operand_(rows_, first_col) {}

  // Issues the loads of the step at column `col`, if they are issued ahead. Call it after arriving for the previous
  // step, whose fence would wait for loads in flight.
  __device__ __forceinline__ void prefetch(int col) {
    if constexpr (waits) operand_.prefetch(waiting_, rows_, 0, Operand::kEach, col, cols_);
  }
  __device__ __forceinline__ void load(unsigned char* to, int col) {
    if constexpr (waits) {
      operand_.store(waiting_, to, rows_, 0, Operand::kEach, col, cols_);
    } else if constexpr (!copied) {
      operand_.template load_and_store<128>(to, rows_, 0, Operand::kEach, col, cols_);
    } else if (cols_ - col < 64) {
      operand_.copy_cut(arch::shared_address(to), 0, cols_ - col);
    } else {
      KERNELS_UNROLL
      for (int i = 0; i < Operand::kEach; ++i) operand_.copy(i, arch::shared_address(to), true, further_);
    }
  }
  // Arrives when everything that this thread has copied or stored is visible.
  static __device__ __forceinline__ void arrive(arch::BarrierAddress full) {
    if constexpr (copied) arch::mbarrier_arrive_copied(full);
    else arch::async_proxy_fence(), arch::mbarrier_arrive(full);
  }

 private:
  struct Rows {
    const X& x;
    const TokenState<X>* states;
    int64_t first, end;
    template <class F>
    __device__ __forceinline__ void operator()(int i, const F& f) const {
      // The tile's first row replaces rows that do not exist.
      const bool there = first + i < end;
      f(states[there ? i : 0].bind(x), there ? first + i : first, there);
    }
  };
  const Rows rows_;
  const int cols_, further_;
  Operand operand_;
  std::conditional_t<waits, typename Operand::Waiting, Nothing> waiting_;
};

}  // namespace detail
KERNELS_END
