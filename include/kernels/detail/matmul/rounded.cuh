// A kernel that rounds operands to 16 bits once, ahead of the product. Otherwise every block would read them through
// their functors again, for each of its tiles.
#pragma once

#include "../../exec.cuh"
#include "product.cuh"

KERNELS_BEGIN
namespace detail {

// The row stride: a multiple of 16 bytes.
inline int64_t rounded_ld(int64_t cols) { return (cols + 7) / 8 * 8; }

// A block takes a row, or a part of it, N columns at a time.
template <class S, class T, int N>
struct RoundBody {
  static constexpr int max_threads = 256, registers = 128, kPacks = 2;  // packs that a thread has in flight
  using State = TokenState<S>;
  // A row's state is computed by one block.
  static constexpr int kPartCols = starts_normed<S> ? 1 << 30 : max_threads * kPacks * N;
  struct Params {
    S source;
    DirectStore<float, T> to;
    Groups groups;
    int cols, parts;  // of a row
  };

  static __device__ __forceinline__ void run(const Params& params) {
    __shared__ typename State::Scratch scratch;
    const int64_t row = blockIdx.x / unsigned(params.parts);
    const int first = int(blockIdx.x % unsigned(params.parts)) * kPartCols,
              end = int(lesser<int64_t>(params.cols, int64_t(first) + kPartCols));
    const Groups& groups = params.groups;
    // With offsets there may be fewer rows than M, and row indices beyond them may be uninitialized.
    if (groups.offsets != nullptr && (row < groups.offsets[0] || row >= groups.offsets[groups.count])) return;
    typename State::Team team(scratch);
    const State state = State::template by_block<N>(team, params.source, row, params.cols, true);
    const auto& source = state.bind(params.source);
    using Source = std::decay_t<decltype(source)>;
    each_run<kPacks>(first + int(threadIdx.x) * N, int(blockDim.x) * N, end, [&](const auto& at) {
      Fetched<Source, N> fetched[at.count];
      fetch_run<N>(fetched, source, row, at);
      KERNELS_UNROLL
      for (int k = 0; k < at.count; ++k)
        params.to.template store<N>(resolve(source, fetched[k], row, at.col(k)), row, at.col(k));
    });
  }
};

// groups: of rows; there may be fewer rows than room.
template <class T, class S>
Status round_rows(const Exec& ex, const S& source, T* to, int64_t rows, int64_t cols, const Groups& groups = {}) {
  const auto start = [&](auto width) {
    using Body = RoundBody<S, T, decltype(width)::value>;
    const int64_t parts = (cols - 1) / Body::kPartCols + 1;
    if (rows > INT32_MAX / parts)
      return unsupported("matmul: there are too many rows for operands that are rounded once");
    Launch how;
    how.threads = Body::max_threads;
    how.grid.x = unsigned(rows * parts);
    return launch<Body>(ex, how, {source, kernels::store(to, rounded_ld(cols)), groups, int(cols), int(parts)});
  };
  constexpr int wide = pack_within<S, 8>;
  if (max_pack_of(source) >= wide && cols % wide == 0) return start(std::integral_constant<int, wide>());
  return start(std::integral_constant<int, 1>());
}

}  // namespace detail
KERNELS_END
