// Row operations whose results are quantized with a scale for each group of columns, if the lanes of the other bodies
// do not hold whole groups (../groups.cuh): a block for each row.
//
// The row is read three times. A thread reads only what it has read before itself, and written if the source has a
// tee().
#pragma once

#include "../groups.cuh"
#include "plan.cuh"

KERNELS_BEGIN
namespace detail {

template <class P, int kPack>
struct OddGroupsBody {
  using C = typename P::C;
  using Source = typename P::Source;
  using Sink = GroupSink<typename P::Sink, kPack, int>;
  static constexpr int max_threads = 256, registers = 128;
  struct Params {
    P problem;
    int lanes_log2;
  };

  static __device__ __forceinline__ void run(const Params& params) {
    __shared__ Scratch<P> scratch;
    BlockTeam team(scratch);
    const P& p = params.problem;
    const Sink sink(p.sink, int(p.cols), params.lanes_log2);
    const int group = sink_end(p.sink).group();
    const int count = int((p.cols + group - 1) / group), each = int(blockDim.x) >> params.lanes_log2;
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
      const auto each_group = [&](const auto& f) {
        KERNELS_ROLLED
        for (int first = 0; first < count; first += each) {
          const int index = first + sink.group_of(threadIdx.x);
          f(sink.place(row, index, index < count));
        }
      };
      const auto value = [&](const auto& source, int col) {
        return resolve(source, fetch<kPack>(source, row, col), row, col);
      };
      // Sums are made of a few packs at a time: in a long chain the rounding error of every addition would be relative
      // to the whole sum.
      const auto& source = cached(p.source);
      typename P::Op::State running, some;
      int taken = 0;
      each_group([&](const auto& at) {
        sink.each_pack(at, [&](int col) {
          const Pack<C, kPack> v = value(source, col);
          take_packs<1>(p.op, some, &v, Always{});
          if (++taken % 16 == 0) p.op.merge(running, some), some = {};
        });
      });
      p.op.merge(running, some);
      const auto state = team.reduce(p.op, running, columns_of(p));
      const auto result = p.op.finish(state, p.columns);
      const auto linear = p.op.linear(state, result);
      if (team.rank() == 0) p.op.write_row(result, row);
      const auto& again = second_pass(p.source);
      const auto finished = [&](int col) { return linear(p.op.center(value(again, col), state)); };
      each_group([&](const auto& at) { sink.write_twice(at, finished, finished); });
    }
  }
};

// Plans and launches this body.
template <class Problem>
class OddGroupsEngine : RowPlanner<Problem> {
  using Planner = RowPlanner<Problem>;
  using Planner::ex_, Planner::p_;
  using Widths = typename Planner::Widths;

 public:
  using Planner::Planner;

  // Whether the other bodies cannot quantize these groups.
  bool needed(const RowPolicy& asked) const {
    return !writes_packs<typename Problem::Sink, Widths::wide> || widest(asked) < Widths::wide ||
           !warps_hold_groups(group(), Widths::wide, p_.cols);
  }
  Status plan(const RowPolicy& asked, RowPlan& plan) const {
    KERNELS_TRY(ex_.status());
    if (loaded_once<typename Problem::Source>)
      return unsupported(
          "quantize: the functor's load runs once, and such groups are read three times: give it a reload<N>(row, "
          "col)");
    if (asked.max_pack < 0 || asked.max_blocks < 0) return invalid("policy: max_pack or max_blocks is negative");
    const bool automatic = asked.residency == Residency::automatic;
    if (automatic && (asked.threads != 0 || asked.cluster != 1))
      return invalid("policy: threads and cluster go with a residency");
    if (asked.cluster != 1 || (!automatic && asked.residency != Residency::streamed))
      return unsupported("policy: such groups as are quantized here are streamed, a row by each block");
    if (asked.threads < 0 || asked.threads > 256 || asked.threads % 32 != 0)
      return invalid("policy: threads of a block is not a multiple of 32 up to 256");
    plan = RowPlan{};
    plan.policy = asked;
    plan.policy.residency = Residency::streamed;
    plan.width = int(p_.cols);
    const auto fits = [&](int width) { return widest(asked) >= width && p_.cols % width == 0 && group() % width == 0; };
    return with_widest<Widths::wide, Widths::middle>(fits, [&](auto width) {
      plan.pack = width();
      const int64_t groups = ceil_div(p_.cols, group()), lanes = groups << lanes_log2(width());
      plan.policy.threads = asked.threads > 0 ? asked.threads : int(lesser<int64_t>(256, round_up(lanes, 32)));
      return Status{};
    });
  }
  Status run(const RowPlan& plan) const {
    const auto fits = [&](int width) { return width <= plan.pack; };
    return with_widest<Widths::wide, Widths::middle>(fits, [&](auto width) {
      using Body = OddGroupsBody<Problem, width()>;
      Launch how;
      how.threads = plan.policy.threads;
      const int64_t limit = plan.policy.max_blocks > 0 ? plan.policy.max_blocks : int64_t(1) << 30;
      how.grid.x = unsigned(lesser(p_.rows, limit));
      return launch<typename Planner::template Started<Body>>(ex_, how, {p_, lanes_log2(width())});
    });
  }

 private:
  int group() const { return sink_end(p_.sink).group(); }
  // For the lanes that share a group.
  int lanes_log2(int pack) const {
    return group_lanes_log2(greater(pack, narrowest_of<SinkEnd<typename Problem::Sink>>()), group());
  }
  int widest(const RowPolicy& asked) const {
    const int most = lesser(max_pack_of(p_.source, p_.cols), max_pack_of(p_.sink, p_.cols));
    return asked.max_pack > 0 ? lesser(most, asked.max_pack) : most;
  }
};

}  // namespace detail
KERNELS_END
