// Groups of columns that are quantized with a scale each: the lanes of a group find its largest value before they
// write.
//
//   row:  | group 0       | group 1       | ...      a power of two of lanes for a group, a pack for each lane;
//         | l0 l1 ... l15 | l0 l1 ... l15 |          groups that a warp does not hold are read twice
#pragma once

#include "../functor.h"
#include "pointwise.cuh"
#include "team.cuh"

KERNELS_BEGIN
namespace detail {

template <class In, class Out, int N>
struct GroupsBody {
  using C = compute_type<In>;
  using Fetched = decltype(fetch<N>(std::declval<const In&>(), kAny, kAny));
  using State = typename SinkEnd<Out>::State;
  static constexpr int max_threads = 256, registers = 128;
  static constexpr int many = sizeof(Fetched) <= 32 ? 2 : 1;  // groups at a time, where a lane has one pack of each
  struct Params {
    In in;
    Out out;
    int64_t cols;
    Tiles groups;
    int lanes_log2;
  };

  static __device__ __forceinline__ void run(const Params& p) {
    const Lanes<> lanes(1 << p.lanes_log2);
    if (sink_end(p.out).group() <= N << p.lanes_log2) held(p, lanes);
    else read_again(p, lanes);
  }

  // The number of a group, and its columns.
  struct Place {
    int64_t row, index, begin, end;
    bool there;
    __device__ __forceinline__ Place(const Params& p, const Tiles::Tile& tile, int at) : there(at < tile.count) {
      p.groups.place(tile, at, [&](int64_t r, int64_t i) { row = r, index = i; });
      begin = index * sink_end(p.out).group();
      end = there ? lesser(begin + sink_end(p.out).group(), p.cols) : begin;
    }
  };

 private:
  template <class Source, class Map>
  static __device__ __forceinline__ auto value(const Source& source, const Map& map, const Fetched& fetched,
                                               int64_t row, int64_t col) {
    return apply_map(map, resolve(source, fetched, row, col), fetch_operands<N>(map, row, col), row, col);
  }
  static __device__ __forceinline__ void gather(State& state, const Lanes<>& lanes) {
    state.largest = lanes.max(state.largest);
  }

  // A lane has one pack of a group at most. All lanes of a warp take part in exchanges, also without a group.
  static __device__ __forceinline__ void held(const Params& p, const Lanes<>& lanes) {
    const auto& map = sink_map(p.out);
    const auto& sink = sink_end(p.out);
    const int each = max_threads >> p.lanes_log2;
    const int64_t size = many * each;
    for (int64_t first = blockIdx.x * size; first < p.groups.units; first += gridDim.x * size) {
      const Tiles::Tile tile = p.groups.tile(first, size);
      const auto place = [&](int u) { return Place(p, tile, u * each + int(lanes.group_of(threadIdx.x))); };
      Fetched fetched[many];
      KERNELS_UNROLL
      for (int u = 0; u < many; ++u) {
        const Place at = place(u);
        const int64_t col = at.begin + lanes.rank() * N;
        if (col < at.end) fetched[u] = fetch<N>(p.in, at.row, col);
      }
      KERNELS_UNROLL
      for (int u = 0; u < many; ++u) {
        const Place at = place(u);
        const int64_t col = at.begin + lanes.rank() * N;
        State state;
        decltype(value(p.in, map, fetched[u], 0, 0)) v{};
        if (col < at.end) state.take(v = value(p.in, map, fetched[u], at.row, col));
        gather(state, lanes);
        if (col < at.end) sink.store(v, state.reciprocal(), at.row, col);
        if (at.there && lanes.rank() == 0) sink.write_scale(state, at.row, at.index);
      }
    }
  }

  static __device__ __forceinline__ void read_again(const Params& p, const Lanes<>& lanes) {
    const auto& map = sink_map(p.out);
    const auto& sink = sink_end(p.out);
    const auto& silent = without_effects(map);
    const auto& again = second_pass(p.in);
    const int64_t size = max_threads >> p.lanes_log2;
    for (int64_t first = blockIdx.x * size; first < p.groups.units; first += gridDim.x * size) {
      const Place at(p, p.groups.tile(first, size), int(lanes.group_of(threadIdx.x)));
      const auto columns = [&](const auto& f) {
        KERNELS_ROLLED
        for (int64_t col = at.begin + lanes.rank() * N; col < at.end; col += lanes.count() * N) f(col);
      };
      State state;
      columns([&](int64_t col) {
        state.take(apply_map(silent, resolve(p.in, fetch<N>(p.in, at.row, col), at.row, col),
                             fetch_operands<N>(silent, at.row, col), at.row, col));
      });
      gather(state, lanes);
      columns([&](int64_t col) {
        const auto v = apply_map(map, resolve(again, fetch<N>(again, at.row, col), at.row, col),
                                 fetch_operands<N>(map, at.row, col), at.row, col);
        sink.store(v, state.reciprocal(), at.row, col);
      });
      if (at.there && lanes.rank() == 0) sink.write_scale(state, at.row, at.index);
    }
  }
};

template <int kWide, int kMiddle, class In, class Out>
Status each_group(const Exec& ex, const In& in, const Out& out, int64_t rows, int64_t cols, int pack) {
  const int group = sink_end(out).group();
  const int64_t row_groups = (cols + group - 1) / group;
  const auto start = [&](auto width) {
    constexpr int N = decltype(width)::value;
    using Body = GroupsBody<In, Out, N>;
    int lanes_log2 = 0;
    while (lanes_log2 < 5 && int64_t(N) << lanes_log2 < group) ++lanes_log2;
    if (loaded_once<In> && int64_t(N) << lanes_log2 < group) {
      return unsupported(
          "quantize: the functor's load runs once, and so large a group is read twice: give it a reload<N>(row, col)");
    }
    const int64_t groups = rows * row_groups, each = int64_t(Body::max_threads >> lanes_log2) * Body::many;
    Launch how;
    how.threads = Body::max_threads;
    how.grid.x = unsigned(lesser<int64_t>((groups + each - 1) / each, int64_t(1) << 30));
    return launch<Body>(ex, how, {in, out, cols, Tiles(rows, row_groups), lanes_log2});
  };
  const auto fits = [&](int width) { return pack >= width && cols % width == 0 && group % width == 0; };
  return with_widest<kWide, kMiddle>(fits, start);
}

}  // namespace detail
KERNELS_END
