// Quantization of groups of columns, each with a computed scale: the lanes of a group find its largest value before
// they write codes.
//
//   row:  | group 0       | group 1       | ...      a power of two of lanes for a group, a pack for each lane, or as
//         | l0 l1 ... l15 | l0 l1 ... l15 |          many as the sink writes at once
//
// If warps hold whole groups, engines whose lanes have adjacent packs write these like any other pack, plus one
// exchange: put_group(). GroupsBody serves all other cases: each group gets its own lanes, and values that these cannot
// hold are read twice. (An exchange within a part of a warp, such as the lanes of a group at the end of a row, takes
// five times as many instructions: H200, CUDA 13.0, 2026-11, 16384 x 16384 halves 333 us, and 305 if whole warps
// exchange.)
#pragma once

#include "../functor.h"
#include "pointwise.cuh"
#include "team.cuh"

KERNELS_BEGIN
namespace detail {

// Whether put_group() can be used: all lanes of a warp have packs of whole groups, and a group has a power of two of
// lanes. For sinks that write such packs.
inline bool warps_hold_groups(int group, int pack, int64_t cols) {
  const int lanes = group / pack;
  return cols % (32 * pack) == 0 && group % pack == 0 && lanes <= 32 && (lanes & (lanes - 1)) == 0;
}
template <class Sink, int kPack>
constexpr bool writes_packs = kPack >= narrowest_of<SinkEnd<Sink>>();
// Writes a pack of a group. Called by all lanes of a warp.
template <class Sink, class C, int N>
__device__ __forceinline__ void put_group(const Sink& sink, const Pack<C, N>& v, int64_t row, int64_t col) {
  const int lanes = sink.group() / N, log2 = 31 - __clz(sink.group());
  typename Sink::State state{};
  state.take(v, col);
  KERNELS_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    if (distance < lanes) state.largest = greater(state.largest, __shfl_xor_sync(0xffffffffu, state.largest, distance));
  }
  sink.store(v, state.finish(), row, col);
  if ((threadIdx.x & (lanes - 1)) == 0) sink.write_scale(state, row, col >> log2);
}

// Writes groups to a sink that quantizes them, for the lanes that share a group, in packs of kPack. Index: counts
// columns.
template <class Out, int kPack, class Index>
class GroupSink {
 public:
  // The columns that a lane takes at a time, and the packs in them.
  static constexpr int kLeast = narrowest_of<SinkEnd<Out>>(), N = kPack > kLeast ? kPack : kLeast, kPacks = N / kPack;
  using State = typename SinkEnd<Out>::State;
  __device__ __forceinline__ GroupSink(const Out& out, Index cols, int lanes_log2)
      : out_(out), cols_(cols), lanes_(1 << lanes_log2) {}

  // Whether the lanes can hold a group: each takes columns of it at most once.
  __device__ __forceinline__ bool holds() const { return size() <= N * lanes_.count(); }
  // The group, among those that a block processes at a time, to which a thread belongs.
  __device__ __forceinline__ int group_of(unsigned thread) const { return int(lanes_.group_of(thread)); }

  // A group: its index in its row, its columns, and the lane's first column.
  struct Place {
    int64_t row;
    Index index, begin, end, col;
    bool there;
    __device__ __forceinline__ bool has() const { return col < end; }
  };
  __device__ __forceinline__ Place place(int64_t row, Index index, bool there) const {
    const Index begin = there ? index * size() : 0, end = there ? lesser<Index>(begin + size(), cols_) : 0;
    return {row, index, begin, end, begin + lanes_.rank() * N, there};
  }

  // Calls f(col) for all packs of a lane.
  template <class F>
  __device__ __forceinline__ void each_pack(const Place& at, const F& f) const {
    KERNELS_ROLLED
    for (Index col = at.col; col < at.end; col += lanes_.count() * N) {
      KERNELS_UNROLL
      for (int i = 0; i < kPacks; ++i) f(col + i * kPack);
    }
  }

  // Writes a group that the lanes hold: value(i) is pack i of a lane that has packs. All lanes of a warp take part in
  // the exchanges, even without a group.
  template <class Value>
  __device__ __forceinline__ void write(const Place& at, const Value& value) const {
    const auto& map = sink_map(out_);
    State state{};
    decltype(all_mapped(map, value, at, 0)) v{};
    if (at.has()) state.take(v = all_mapped(map, value, at, at.col), at.col);
    gather(state);
    if (at.has()) sink_end(out_).store(v, state.finish(), at.row, at.col);
    write_scale(state, at);
  }
  // Writes any group: value(col) is read in the first pass, again(col) in the second.
  template <class Value, class Again>
  __device__ __forceinline__ void write_twice(const Place& at, const Value& value, const Again& again) const {
    const auto& map = sink_map(out_);
    const auto& silent = without_effects(map);
    State state{};
    each_pack(at, [&](Index col) { state.take(mapped(silent, value(col), at, col), col); });
    gather(state);
    KERNELS_ROLLED
    for (Index col = at.col; col < at.end; col += lanes_.count() * N) {
      const auto v = all_mapped(map, [&](int i) { return again(col + i * kPack); }, at, col);
      sink_end(out_).store(v, state.finish(), at.row, col);
    }
    write_scale(state, at);
  }

 private:
  __device__ __forceinline__ int size() const { return sink_end(out_).group(); }
  template <class Map, class V>
  static __device__ __forceinline__ auto mapped(const Map& map, const V& v, const Place& at, Index col) {
    return apply_map(map, v, fetch_operands<kPack>(map, at.row, col), at.row, col);
  }
  template <class Map, class Value>
  static __device__ __forceinline__ auto all_mapped(const Map& map, const Value& value, const Place& at, Index col) {
    Pack<typename decltype(mapped(map, value(0), at, col))::value_type, N> out;
    KERNELS_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      const auto v = mapped(map, value(i), at, col + i * kPack);
      KERNELS_UNROLL
      for (int j = 0; j < kPack; ++j) out.v[i * kPack + j] = v.v[j];
    }
    return out;
  }
  __device__ __forceinline__ void gather(State& state) const { state.largest = (lanes_.max)(state.largest); }
  __device__ __forceinline__ void write_scale(const State& state, const Place& at) const {
    if (at.there && lanes_.rank() == 0) sink_end(out_).write_scale(state, at.row, at.index);
  }

  const Out& out_;
  Index cols_;
  Lanes<> lanes_;
};

// The lanes that share a group, as a power of two, if each takes `columns` columns at a time.
inline int group_lanes_log2(int columns, int group) {
  int log2 = 0;
  while (log2 < 5 && int64_t(columns) << log2 < group) ++log2;
  return log2;
}
// Quantizes groups of the values that the source gives.
template <class In, class Out, int kPack>
struct GroupsBody {
  using Sink = GroupSink<Out, kPack, int64_t>;
  struct Fetched {
    decltype(fetch<kPack>(std::declval<const In&>(), kAny, kAny)) packs[Sink::kPacks];
  };
  static constexpr int max_threads = 256, registers = 128;
  static constexpr int many = sizeof(Fetched) <= 32 ? 2 : 1;  // groups at a time, if the lanes hold them
  struct Params {
    In in;
    Out out;
    int64_t cols;
    Tiles groups;
    int lanes_log2;
  };

  static __device__ __forceinline__ void run(const Params& p) {
    const Sink sink(p.out, p.cols, p.lanes_log2);
    const bool holds = sink.holds();
    const int each = max_threads >> p.lanes_log2;
    const int64_t size = (holds ? many : 1) * each;
    for (int64_t first = blockIdx.x * size; first < p.groups.units; first += gridDim.x * size) {
      const Tiles::Tile tile = p.groups.tile(first, size);
      const auto place = [&](int u) {
        const int mine = u * each + sink.group_of(threadIdx.x);
        typename Sink::Place at;
        p.groups.place(tile, mine, [&](int64_t row, int64_t index) { at = sink.place(row, index, mine < tile.count); });
        return at;
      };
      if (holds)
        held(p.in, sink, place);
      else
        read_twice(p.in, sink, place(0));
    }
  }

 private:
  template <class PlaceOf>
  static __device__ __forceinline__ void held(const In& in, const Sink& sink, const PlaceOf& place) {
    Fetched fetched[many];
    KERNELS_UNROLL
    for (int u = 0; u < many; ++u) {
      const auto at = place(u);
      if (!at.has()) continue;
      KERNELS_UNROLL
      for (int i = 0; i < Sink::kPacks; ++i) fetched[u].packs[i] = fetch<kPack>(in, at.row, at.col + i * kPack);
    }
    KERNELS_UNROLL
    for (int u = 0; u < many; ++u) {
      const auto at = place(u);
      sink.write(at, [&](int i) { return resolve(in, fetched[u].packs[i], at.row, at.col + i * kPack); });
    }
  }
  static __device__ __forceinline__ void read_twice(const In& in, const Sink& sink, const typename Sink::Place& at) {
    const auto& again = second_pass(in);
    sink.write_twice(
        at, [&](int64_t col) { return resolve(in, fetch<kPack>(in, at.row, col), at.row, col); },
        [&](int64_t col) { return resolve(again, fetch<kPack>(again, at.row, col), at.row, col); });
  }
};

template <int kWide, int kMiddle, class In, class Out>
Status each_group(const Exec& ex, const In& in, const Out& out, int64_t rows, int64_t cols, int pack) {
  const int group = sink_end(out).group();
  const int64_t row_groups = (cols + group - 1) / group;
  const auto start = [&](auto width) {
    using Body = GroupsBody<In, Out, decltype(width)::value>;
    constexpr int N = Body::Sink::N;
    const int lanes_log2 = group_lanes_log2(N, group);
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
