// The treatment of one row of logits: drawing a token, verifying a draft, log-probabilities. The engines call it with a
// Row as core/sampling_search.h describes.
#pragma once

#include "sampling_search.h"

KERNELS_BEGIN
namespace detail {

// The random numbers of a row: for its token, for accepting a draft, and for further tries.
struct RowDraw {
  uint64_t seed, token, draft;
  KERNELS_HD RowDraw(const SampleOptions& o, int64_t row, uint64_t steps_on) : seed(o.seed.at(row)) {
    set(o.seed.for_each_row() ? 0 : uint64_t(row), o.step.at(row) + steps_on);
  }
  KERNELS_HD void again() { set(token, draft); }

 private:
  KERNELS_HD void set(uint64_t low, uint64_t high) {
    const auto bits = philox(seed, low, high);
    token = uint64_t(bits[1]) << 32 | bits[0];
    draft = uint64_t(bits[3]) << 32 | bits[2];
  }
};

constexpr int64_t kNoToken = -1, kAccepted = -2;

KERNELS_HD void write_sampled(const SampleOptions& o, const TokenOutput& tokens, int64_t number, Sampled status,
                              int64_t token) {
  tokens.write(number, token);
  if (o.status != nullptr) o.status[number] = int32_t(status);
}

// Draws a token in the order of ids; it is in shared().edge afterwards. top_p: applied to what the other filters keep,
// by rejection, unless it is 1. top_p keeps a prefix of the tokens ordered by logit, so a rejected token and all behind
// it can be excluded from the next try.
template <class Row, class V>
KERNELS_HD void draw_by_id(Row& row, V& visit, const SampleRules& rules, float top_p, RowDraw draw) {
  visit.stage = Stage::draw;
  const uint64_t at_least = rules.min_p > 0.f ? least_weight_of(rules.min_p) : 0;
  if (top_p >= 1.f) visit.kept.least_weight = at_least;
  uint64_t share = 0;
  bool drawn = false;
  KERNELS_ROLLED
  for (;;) {
    const uint64_t mass = row.weigh(visit);
    if (drawn) {
      if (mass < share) return;
      draw.again();
    } else if (share == 0 && top_p < 1.f) {
      share = share_of(top_p, mass);
      visit.kept.least_weight = at_least;
      if (at_least > 0) continue;
    } else if (mass == 0) {  // the remaining weights are all 0: the draft has all of the row's weight
      visit.draft.give_up();
      continue;
    }
    row.find(visit, high_product(draw.token, mass));
    if (share == 0) return;
    drawn = true;
    visit.kept.least = row.shared().edge + 1;
  }
}

// Applies the filters one after the other until the remaining tokens fit into the list. k: of top_k(), 0: all. exactly:
// whether top_p() is applied here, and not by rejection.
template <class Row, class V>
KERNELS_HD void narrow_down(Row& row, const SampleShared& s, V& visit, const SampleRules& rules, int k, bool exactly,
                            bool& listed) {
  KERNELS_ROLLED
  for (int i = 0; !listed && i < int(Stage::draw); ++i) {
    const Stage stage = visit.stage = Stage(i);
    if (stage == Stage::typical && exactly && rules.min_p > 0.f) visit.kept.least_weight = least_weight_of(rules.min_p);
    const bool wanted = stage == Stage::top_k   ? k > 0
                        : stage == Stage::top_p ? exactly && rules.top_p < 1.f
                                                : rules.typical < 1.f;
    if (!wanted) continue;
    if (stage == Stage::typical) {
      uint64_t sums[4];
      visit.what = V::summing;
      row.sums(visit, sums);
      visit.kept.center = mean_level(sums[0], sums[1], sums[2]);
    }
    select(row, visit, [&](uint64_t total) {
      return stage == Stage::top_k ? lesser(uint64_t(k), total)
                                   : share_of(stage == Stage::top_p ? rules.top_p : rules.typical, total);
    });
    if (stage == Stage::typical) visit.kept.by_distance = true, visit.kept.nearest = s.edge;
    else visit.kept.least = s.edge;
    if (stage == Stage::top_k && k <= kFew) {
      visit.what = V::listing;
      row.visit(first_of_entry(s.edge), visit);
      row.sync();
      listed = true;
    }
  }
}

// Draws a token for one row, or writes kAccepted. `number`: where the token is written.
template <class Row, class Draft>
KERNELS_HD void sample_row(Row& row, const SampleOptions& o, const SampleRules& rules, int64_t number,
                           int64_t vocabulary, const TokenOutput& tokens, const RowDraw& draw, const Draft& draft) {
  const auto conclude = [&](Sampled status, int64_t token) {
    if (row.is_first()) write_sampled(o, tokens, number, status, token);
  };
  if (!rules.right()) return conclude(Sampled::parameter, kNoToken);

  const int k = rules.temperature == 0.f ? 1 : kept_by(rules.top_k, vocabulary);
  const bool few = k > 0 && k <= kMostListed;
  uint32_t floor = 0;
  const uint32_t top = row.look(few ? k : 0, floor);
  if (top == kNanKey) return conclude(Sampled::nan, kNoToken);
  if (top <= kLowestKey) return conclude(Sampled::none, kNoToken);

  SampleShared& s = row.shared();
  using V = Visit<Draft>;
  V visit(Levels(top, rules.temperature), draft);
  bool listed = false;
  if (few) {
    row.list(greater(floor, kLowestKey + 1));
    row.sync();
    listed = s.listed <= uint32_t(kFew);
  }
  // A draft, and typical(), need the probabilities after top_p().
  const bool exactly = rules.typical < 1.f || visit.draft.drafted();
  narrow_down(row, s, visit, rules, k, exactly, listed);
  if (listed) {
    if (row.is_leader() && choose_listed(row.block(), k, rules, visit, draw.token))
      return conclude(Sampled::ok, kAccepted);
  } else {
    if (visit.draft.drafted()) {
      uint64_t sums[4];
      visit.what = V::summing;
      visit.stage = Stage::draw;
      row.sums(visit, sums);
      if (visit.draft.accepts(sums[3], sums[0])) return conclude(Sampled::ok, kAccepted);
    }
    draw_by_id(row, visit, rules, exactly ? 1.f : rules.top_p, draw);
  }
  conclude(Sampled::ok, id_of(s.edge));
}

template <class Row>
KERNELS_HD void score_row(Row& row, const LogProbOutputs& out, int64_t number, int64_t vocabulary) {
  const int k = int(out.count);
  uint32_t floor = 0;
  const uint32_t top = row.look(k, floor);
  SampleShared& s = row.shared();
  Visit<NoDraft> visit(Levels(top, 1.f), NoDraft{});
  const bool right = top != kNanKey && top > kLowestKey;
  double log_total = 0;
  if (right) {
    visit.what = Visit<NoDraft>::summing;
    uint64_t sums[4];
    row.sums(visit, sums);
    log_total = ::log(double(sums[0]) * 0x1p-40);
    bool listed = false;
    if (k > 0) {
      row.list(greater(floor, kLowestKey + 1));
      row.sync();
      listed = s.listed <= uint32_t(kFew);
    }
    if (k > 0 && !listed) {
      visit.stage = Stage::top_k;
      select(row, visit, [k](uint64_t total) { return lesser(uint64_t(k), total); });
      visit.kept.least = s.edge;
      visit.what = Visit<NoDraft>::listing;
      row.visit(first_of_entry(s.edge), visit);
      row.sync();
    }
  }
  if (!row.is_leader()) return;
  const auto log_prob = [top, right, log_total](uint32_t key) {
    const float x = logit_of(key), most = logit_of(top);
    if (top == kNanKey || key == kNanKey) return logit_of(kNanKey);
    return x == most && right        ? float(-log_total)
           : x <= -infinity<float>() ? x
                                     : float(double(x) - double(most) - log_total);
  };
  auto& block = row.block();
  SampleShared& mine = block.shared();
  if (k > 0) {
    const int listed = right ? int(mine.listed) : 0;
    block.ranks(listed, mine.entries, [&mine](int i, int rank) { mine.sorted[rank] = mine.entries[i]; });
    block.each(k, [&](int i) {
      const int64_t at = number * out.ld + i;
      if (out.ids.wanted()) out.ids.write(at, i < listed ? int64_t(id_of(mine.sorted[i])) : kNoToken);
      if (out.values != nullptr)
        out.values[at] = log_prob(top == kNanKey ? kNanKey : i < listed ? first_of_entry(mine.sorted[i]) : kLowestKey);
    });
  }
  if (out.says_chosen && row.is_first()) {
    const int64_t token = out.chosen.read(number);
    out.log_probs[number] = log_prob(token >= 0 && token < vocabulary ? row.key_at(token) : kNanKey);
  }
}

// ---- what the engines do with each row ------------------------------------------------------------------------------

template <class Source_>
struct SampleProblem {
  using Source = Source_;
  static constexpr bool kOnlyDraws = true;  // sample_row() without a draft
  Source source;
  int64_t rows, vocabulary;  // before the options, so that calls that need few options do not wait for them
  TokenOutput tokens;
  SampleOptions options;

  KERNELS_HD SampleRules rules(int64_t row) const { return SampleRules(options, row); }
  template <class Row>
  KERNELS_HD void solve(Row& one, const SampleRules& rules, int64_t row) const {
    sample_row(one, options, rules, row, vocabulary, tokens, RowDraw(options, row, 0), NoDraft{});
  }
};

// Row r belongs to sequence r / (drafts + 1) and follows r % (drafts + 1) of its drafted tokens.
template <class Source_, class Q>
struct VerifyProblem {
  using Source = Source_;
  static constexpr bool kOnlyDraws = false;
  Source source;
  SampleOptions options;
  TokenOutput tokens, drafted;
  int64_t drafted_ld, drafts;
  Q q;
  int32_t* accepted;
  int64_t rows, vocabulary;

  KERNELS_HD SampleRules rules(int64_t row) const { return SampleRules(options, row / (drafts + 1)); }
  template <class Row>
  KERNELS_HD void solve(Row& one, const SampleRules& rules, int64_t row) const {
    const int64_t sequence = row / (drafts + 1), place = row - sequence * (drafts + 1);
    const RowDraw draw(options, sequence, uint64_t(place));
    const int64_t token = place < drafts ? drafted.read(sequence * drafted_ld + place) : kNoToken;
    sample_row(one, options, rules, row, vocabulary, tokens, draw,
               DraftOf<Q>(q, sequence * drafts + place, token, vocabulary, draw.draft));
  }
  // Runs after all rows are done.
  KERNELS_HD void finish(int64_t sequence) const {
    const int64_t first = sequence * (drafts + 1);
    int64_t count = 0;
    for (; count < drafts && tokens.read(first + count) == kAccepted; ++count)
      tokens.write(first + count, drafted.read(sequence * drafted_ld + count));
    for (int64_t i = count + 1; i <= drafts; ++i) tokens.write(first + i, kNoToken);
    accepted[sequence] = int32_t(count);
  }
};

template <class Source_>
struct ScoreProblem {
  using Source = Source_;
  static constexpr bool kOnlyDraws = false;
  Source source;
  SampleOptions options;  // none
  LogProbOutputs out;
  int64_t rows, vocabulary;

  KERNELS_HD SampleRules rules(int64_t row) const { return SampleRules(options, row); }
  template <class Row>
  KERNELS_HD void solve(Row& one, const SampleRules&, int64_t row) const { score_row(one, out, row, vocabulary); }
};

// Argument checks.
template <class Load>
constexpr bool takes_logits() {
  constexpr bool right = takes_source<Load>();
  if constexpr (right) {
    static_assert(
        !has_effects<Load>,
        "sampling reads logits more than once, and tee() or another effect must happen once: write them with copy() before");
    static_assert(!loaded_once<Load>,
                  "sampling reads logits more than once, and a load in OneFlow's form runs once: give it a reload");
    return !has_effects<Load> && !loaded_once<Load>;
  } else {
    return false;
  }
}
template <class Load>
Status check_sample(const Load& logits, const TokenOutput& tokens, int64_t rows, int64_t vocabulary,
                    const Sampling& options) {
  KERNELS_TRY(options.check(rows, vocabulary));
  if (rows == 0) return {};
  KERNELS_TRY(check_of(logits, rows, vocabulary).of("logits"));
  if (!tokens.wanted()) return invalid("tokens: the pointer is null");
  return tokens.check("tokens: the pointer is not aligned for its elements");
}
template <class Load, class Q>
Status check_verify(const VerifyProblem<Load, Q>& p, const VerifyShape& shape, const Sampling& options) {
  if (shape.sequences < 0) return invalid("sequences is negative");
  if (shape.drafts < 0 || shape.drafts > kMostDrafts) return invalid("drafts is negative or larger than 65,535");
  if (shape.sequences > (int64_t(1) << 40)) return invalid("sequences is larger than 2^40");
  KERNELS_TRY(check_sample(p.source, p.tokens, p.rows, p.vocabulary, options));
  if (p.rows == 0) return {};
  if (p.drafts > 0) {
    if (!p.drafted.wanted()) return invalid("drafts: the pointer to tokens is null");
    KERNELS_TRY(p.drafted.check("drafts: the pointer to tokens is not aligned for its elements"));
    if (p.drafted_ld < p.drafts) return invalid("drafts: ld is less than the number of drafts");
    KERNELS_TRY(p.q.check(shape.sequences * p.drafts, p.vocabulary));
  }
  return check_pointer(p.accepted, "accepted: the pointer is null",
                       "accepted: the pointer is not aligned for its elements");
}
template <class Load>
Status check_score(const Load& logits, const LogProbs& options, int64_t rows, int64_t vocabulary) {
  KERNELS_TRY(check_vocabulary(rows, vocabulary));
  KERNELS_TRY(options.check(rows));
  return rows == 0 ? Status{} : check_of(logits, rows, vocabulary).of("logits");
}

}  // namespace detail
KERNELS_END
