// The host side of the row engine: checks arguments, has a plan made (plan.cuh) and launches its body.
#pragma once

#include "odd_groups.cuh"
#include "plan.cuh"

KERNELS_BEGIN
namespace detail {

constexpr int64_t kMaxGrid = 0x7fffffff;

// Launches the body of a plan.
template <class Problem>
class RowEngine : public RowPlanner<Problem> {
  using Planner = RowPlanner<Problem>;

 public:
  using Planner::wide, Planner::middle, Planner::ends, Planner::packs, Planner::group_packs, Planner::kDeep;
  using typename Planner::EndsProblem, typename Planner::EndsGroup, typename Planner::EndsStream;

  using Planner::Planner;

  Status run(const RowPlan& plan) const {
    if constexpr (ends) {
      if (plan.ends) return run_with_ends(plan);
    }
    if (Problem::quantizes_groups || plan.pack == wide) return run_with<wide>(plan);
    if constexpr (!Problem::quantizes_groups) {
      if (plan.pack == 1) return run_with<1>(plan);
      return run_with<middle>(plan);
    }
    return {};
  }

 private:
  using Planner::ex_, Planner::p_, Planner::kept_bytes;

  int64_t blocks(const RowPlan& plan, int64_t wanted) const {
    const int64_t cluster = plan.policy.cluster;
    int64_t limit = kMaxGrid / cluster * cluster;
    if (plan.policy.max_blocks > 0) limit = lesser(limit, round_up(plan.policy.max_blocks, cluster));
    return lesser(limit, wanted);
  }

  template <class Body>
  Status start(const Launch& how, const typename Body::Params& params) const {
    return launch<typename Planner::template Started<Body>>(ex_, how, params);
  }

  template <int N>
  Status run_with(const RowPlan& plan) const {
    const RowPolicy& policy = plan.policy;
    constexpr int K = packs(N);
    constexpr bool has_group_body = N == wide || N == 1;
    Launch how;
    how.threads = policy.threads;
    how.cluster = policy.cluster;
    how.grid.x = unsigned(blocks(plan, p_.rows * policy.cluster));
    switch (policy.residency) {
      case Residency::registers:
        return start<BlockBody<Problem, N, packs(N)>>(how, {p_, plan.width, plan.warp_width, plan.count});
      case Residency::shared:
      case Residency::streamed:
        how.shared = size_t(plan.kept * kept_bytes(plan));
        if constexpr (N == wide && kDeep > K) {
          // If one block fills a multiprocessor, or blocks are few, each thread needs more loads in flight.
          using Deep = StreamBody<Problem, N, kDeep>;
          const bool few = p_.rows * policy.cluster <= 2 * ex_.device().sm_count && !policy.batch_invariant;
          if ((few || policy.threads > 512) && plan.kept == 0 && policy.threads <= Deep::max_threads &&
              plan.warp_width >= 32 * N * kDeep) {
            return start<Deep>(how, {p_, plan, {}});
          }
        }
        return start<StreamBody<Problem, N, K>>(how, {p_, plan, {}});
      case Residency::group:
        if constexpr (has_group_body) return run_groups<N>(plan);
        break;
      case Residency::split:
        if constexpr (has_group_body && !Problem::row_sink) {
          how.grid.x = unsigned(blocks(plan, p_.rows * plan.chunks));
          const SplitParams<Problem> params{p_, static_cast<typename Problem::Op::State*>(ex_.workspace().ptr),
                                            plan.chunks, plan.width};
          KERNELS_TRY((start<PartialBody<Problem, N, K>>(how, params)));
          return start<FinishBody<Problem, N, K>>(how, params);
        }
        break;
      case Residency::automatic: break;
    }
    return unsupported("policy: no kernel is compiled for this combination");
  }

  Status run_with_ends(const RowPlan& plan) const {
    const EndsProblem problem{p_.op, leading(p_.source), any_column(p_.sink), p_.rows, p_.cols, p_.columns};
    const Phase<true> phase{this->phase()};
    if (plan.policy.residency == Residency::group) {
      int lanes_log2 = 0;
      const Launch how = groups_of(plan, lanes_log2);
      return start<EndsGroup>(how, {problem, lanes_log2, phase});
    }
    Launch how;
    how.threads = plan.policy.threads;
    how.cluster = plan.policy.cluster;
    how.grid.x = unsigned(blocks(plan, p_.rows * how.cluster));
    return start<EndsStream>(how, {problem, plan, phase});
  }

  Launch groups_of(const RowPlan& plan, int& lanes_log2) const {
    while (1 << lanes_log2 < plan.policy.threads) ++lanes_log2;
    Launch how;
    how.threads = tuning::kGroupBlock;
    how.grid.x = unsigned(blocks(plan, ceil_div(p_.rows, int64_t(how.threads >> lanes_log2))));
    return how;
  }

  template <int N>
  Status run_groups(const RowPlan& plan) const {
    int lanes_log2 = 0;
    const Launch how = groups_of(plan, lanes_log2);
    constexpr int K = group_packs(N);
    if constexpr (N == wide) {
      if (plan.count == K) return start<GroupBody<Problem, N, K, true>>(how, {p_, lanes_log2, {}});
    }
    return start<GroupBody<Problem, N, K, false>>(how, {p_, lanes_log2, {}});
  }
};

template <class Options, class Source, class Sink>
Status plan_rows(const Exec& ex, const Options& options, const Source& source, const Sink& sink, int64_t rows,
                 int64_t cols, const RowPolicy& policy, RowPlan& plan, bool start) {
  if constexpr (!takes_values<Source, Sink>()) {
    return not_compiled();
  } else {
    bool empty = false;
    KERNELS_TRY(check_rows(options, source, sink, rows, cols, empty));
    if (empty) return {};
    using C = compute_type<Source>;
    using Op = decltype(options.template op<C>());
    using Problem = RowProblem<Op, Source, Sink>;
    const Problem problem{options.template op<C>(), source, sink, rows, cols, Count<C>(int(cols))};
    if constexpr (by_group<Sink>) {
      const OddGroupsEngine<Problem> odd(ex, problem);
      if (odd.needed(policy)) {
        KERNELS_TRY(odd.plan(policy, plan));
        return start ? odd.run(plan) : Status{};
      }
    }
    if constexpr (!by_group<Sink> || writes_packs<Sink, PackWidths<Source, Sink>::wide>) {
      const RowEngine<Problem> engine(ex, problem);
      KERNELS_TRY(engine.plan(policy, plan));
      return start ? engine.run(plan) : Status{};
    } else {
      return {};
    }
  }
}

template <class Options, class Source, class Sink>
Status run_rows(const Exec& ex, const Options& options, const Source& source, const Sink& sink, int64_t rows,
                int64_t cols, const RowPolicy& policy) {
  RowPlan plan;
  return plan_rows(ex, options, source, sink, rows, cols, policy, plan, true);
}

}  // namespace detail

// How softmax, layernorm ... would run: k::row_plan(ex, k::Softmax{}, in, out, rows, cols, policy, plan).
template <class Options, class Source, class Sink>
Status row_plan(const Exec& ex, const Options& options, const Source& source, const Sink& sink, int64_t rows,
                int64_t cols, const RowPolicy& policy, RowPlan& plan) {
  return detail::plan_rows(ex, options, source, sink, rows, cols, policy, plan, false);
}

// The workspace with which few, long rows are split over the whole GPU in code without clusters (before sm_90).
inline size_t row_workspace_bytes(int64_t rows) {
  return size_t(rows > 0 ? rows : 0) * tuning::kMaxChunks * 4 * sizeof(double);
}

KERNELS_END
