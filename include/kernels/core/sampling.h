// Sampling: options and arithmetic that the GPU and the CPU share. sampling_numbers.h has the arithmetic that decides,
// sampling_search.h the search for the token, sampling_row.h the treatment of a row.
//
// Both draw the same token from the same logits and seed, whatever the number of threads or blocks, because every
// decision is made in integers. A logit becomes an integer, its level: its distance below the largest logit of the row,
// in units of 2^-24 of a factor of two. The weight of a level is 2^40 2^(-level / 2^24), an integer as well, so sums of
// weights do not depend on their order. A token that is less likely than the likeliest one by more than a factor of
// 2^40 has weight 0.
//
// Tokens are ordered by their logits, the largest first; equal logits by id, the lowest first. Every filter keeps a
// prefix of that order (except typical(), which has an order of its own). The draw is the first token at which the
// cumulative weight exceeds a random share of the total. Tokens are cumulated in the order of logits if there is a
// top_k() of up to kFew, otherwise in the order of ids, which needs no sorting. top_p() alone needs no sorting either:
// a token is drawn from all; if top_p() would drop it, the next one is drawn from the tokens ahead of it, until top_p()
// keeps it.
#pragma once

#include <cmath>
#include <limits>

#include "arguments.h"
#include "philox.h"
#include "sampling_numbers.h"

KERNELS_BEGIN

// The status of a row, written if Sampling{}.status(p) is set. All but ok come with token -1.
enum class Sampled : int32_t {
  ok,
  nan,        // one of the row's logits is NaN
  none,       // no token is allowed: every logit is -infinity, or hidden by allowed()
  parameter,  // a parameter that lies on the device is outside its limits
};

namespace detail {

// A parameter: one number for all rows, or a pointer to one for each row, `stride` apart.
template <class T>
class RowValue {
 public:
  template <class A, class = std::enable_if_t<std::is_arithmetic<A>::value>>
  RowValue(A value) : value_(narrow(value)) {}
  RowValue(const T* p, int64_t stride = 1) : p_(p), stride_(stride), on_device_(true) {}

  bool on_device() const { return on_device_; }
  KERNELS_HD bool for_each_row() const { return p_ != nullptr && stride_ != 0; }
  T value() const { return value_; }
  KERNELS_HD T at(int64_t row) const { return p_ == nullptr ? value_ : p_[row * stride_]; }
  Status check(int64_t rows, const char* null, const char* misaligned, const char* negative,
               const char* too_far) const {
    if (!on_device_) return {};
    KERNELS_TRY(check_pointer(p_, null, misaligned));
    if (stride_ < 0) return invalid(negative);
    return rows_overflow<T>(rows, stride_) ? invalid(too_far) : Status{};
  }

 private:
  template <class A>
  static T narrow(A value) {
    if constexpr (std::is_integral<T>::value && std::is_signed<T>::value) {
      const int64_t wide = int64_t(value), most = (std::numeric_limits<T>::max)(),
                    least = (std::numeric_limits<T>::min)();
      return T(wide > most ? most : wide < least ? least : wide);
    } else {
      return static_cast<T>(value);
    }
  }

  T value_ = T();
  const T* p_ = nullptr;
  int64_t stride_ = 0;
  bool on_device_ = false;
};

// An array of token ids that is written or read: int32_t or int64_t.
class TokenOutput {
 public:
  TokenOutput() = default;
  template <class T>
  TokenOutput(T* p) : to_(const_cast<std::remove_const_t<T>*>(p)), wide_(sizeof(T) == sizeof(int64_t)) {
    static_assert(std::is_integral<T>::value && std::is_signed<T>::value && sizeof(T) >= 4,
                  "tokens are numbers of 32 or 64 bits with a sign");
  }

  KERNELS_HD bool wanted() const { return to_ != nullptr; }
  Status check(const char* misaligned) const {
    return reinterpret_cast<uintptr_t>(to_) % (wide_ ? alignof(int64_t) : alignof(int32_t)) == 0 ? Status{}
                                                                                                 : invalid(misaligned);
  }
  KERNELS_HD void write(int64_t at, int64_t token) const {
    if (wide_) static_cast<int64_t*>(to_)[at] = token;
    else static_cast<int32_t*>(to_)[at] = int32_t(token);
  }
  KERNELS_HD int64_t read(int64_t at) const {
    return wide_ ? static_cast<const int64_t*>(to_)[at] : static_cast<const int32_t*>(to_)[at];
  }

 private:
  void* to_ = nullptr;
  bool wide_ = false;
};

template <class T>
struct StridedRows {
  const T* p = nullptr;
  int64_t ld = 0;
  KERNELS_HD const T* at(int64_t row) const { return p + row * ld; }
};

// How often a token occurs in a list and whether in its prompt part, in one number.
struct Occurrences {
  static constexpr int32_t kInPrompt = 1 << 30;
  static KERNELS_HD int32_t with(int32_t so_far, bool in_prompt) { return in_prompt ? so_far | kInPrompt : so_far + 1; }
  static KERNELS_HD bool prompted(int64_t all) { return all >= kInPrompt; }
  static KERNELS_HD int64_t times(int64_t all) { return all & (kInPrompt - 1); }
};

struct SampleOptions {
  RowValue<float> temperature = 1.f, top_p = 1.f, min_p = 0.f, typical = 1.f;
  RowValue<float> repetition = 1.f, presence = 0.f, frequency = 0.f;
  RowValue<int32_t> top_k = 0;
  RowValue<uint64_t> seed = 0, step = 0;
  float soft_cap = 0.f;
  StridedRows<float> bias;
  StridedRows<uint32_t> allowed;
  StridedRows<int32_t> counts, previous;
  const int32_t *lengths = nullptr, *prompts = nullptr;
  bool says_bias = false, says_allowed = false, says_counts = false, says_previous = false, says_prompts = false,
       says_status = false;
  int32_t* status = nullptr;

  KERNELS_HD bool penalized() const { return counts.p != nullptr || previous.p != nullptr; }
  // Whether only logits of tokens in previous() change.
  KERNELS_HD bool only_listed() const {
    return previous.p != nullptr && counts.p == nullptr && !(soft_cap > 0.f) && bias.p == nullptr &&
           allowed.p == nullptr;
  }
  KERNELS_HD bool adjusted() const {
    return soft_cap > 0.f || bias.p != nullptr || allowed.p != nullptr || penalized();
  }
};

// Log-probabilities of a row: of its largest logits, and of one given token.
class LogProbOutputs {
 public:
  TokenOutput chosen, ids;
  float *log_probs = nullptr, *values = nullptr;
  int64_t count = 0, ld = 0;
  bool says_chosen = false, says_top = false;
};

// A drafter that is certain of its token, and one with known probabilities.
struct Certain {
  static Status check(int64_t, int64_t) { return {}; }
  KERNELS_HD float at(int64_t, uint32_t id, uint32_t token) const { return id == token ? 1.f : 0.f; }
};
template <class Load>
struct Uncertain {
  Load load;
  Status check(int64_t rows, int64_t vocabulary) const { return check_of(load, rows, vocabulary).of("probabilities"); }
  KERNELS_HD float at(int64_t row, uint32_t id, uint32_t) const {
    return convert<float>(resolve(load, fetch<1>(load, row, int64_t(id)), row, int64_t(id))).v[0];
  }
};

constexpr int64_t kMostDrafts = 65535;

}  // namespace detail

// Drafted tokens: rows of a matrix of int32_t or int64_t, a row for each sequence; and q, a source of the probabilities
// that the drafter gave to all tokens of the vocabulary, with row sequence * drafts + i for draft i. Without q the
// drafter counts as certain, as a look-up drafter is. An entry that is not a token, such as -1, ends the sequence's
// drafts before it.
template <class Q>
struct Drafts {
  detail::TokenOutput tokens;
  int64_t ld;
  Q q;
};
template <class T>
Drafts<detail::Certain> drafts(const T* tokens, int64_t ld) {
  return {detail::TokenOutput(tokens), ld, {}};
}
template <class T, class Load>
Drafts<detail::Uncertain<Load>> drafts(const T* tokens, int64_t ld, const Load& probabilities) {
  return {detail::TokenOutput(tokens), ld, {probabilities}};
}

struct VerifyShape {
  int64_t sequences, drafts, vocabulary;
  int64_t rows() const { return int64_t(uint64_t(sequences) * (uint64_t(drafts) + 1)); }
};

// Outputs of log_probs(). k::LogProbs{}.of(tokens, log_probs): of one token of each row. .top(n, ids, log_probs, ld):
// of the n largest of each row, in descending order with their ids; n is at most 256, and ids or log_probs may be null
// if not wanted.
class LogProbs {
 public:
  template <class T>
  LogProbs& of(const T* tokens, float* log_probs) {
    o_.says_chosen = true;
    o_.chosen = detail::TokenOutput(tokens);
    o_.log_probs = log_probs;
    return *this;
  }
  template <class T>
  LogProbs& top(int64_t n, T* ids, float* log_probs, int64_t ld) {
    o_.says_top = true;
    o_.count = n;
    o_.ids = detail::TokenOutput(ids);
    o_.values = log_probs;
    o_.ld = ld;
    return *this;
  }

  const detail::LogProbOutputs& outputs() const { return o_; }
  Status check(int64_t rows) const {
    if (o_.count < 0 || o_.count > 256) return invalid("top: n is not from 0 to 256");
    if (!o_.says_chosen && !o_.says_top) return invalid("neither of() nor top() says what is wanted");
    if (rows == 0) return {};
    if (o_.says_chosen) {
      if (!o_.chosen.wanted()) return invalid("of: the pointer to tokens is null");
      KERNELS_TRY(o_.chosen.check("of: the pointer to tokens is not aligned for its elements"));
      KERNELS_TRY(detail::check_pointer(o_.log_probs, "of: the pointer to log_probs is null",
                                        "of: the pointer to log_probs is not aligned for its elements"));
    }
    if (o_.count > 0) {
      if (o_.ld < o_.count) return invalid("top: ld is less than n");
      if (!o_.ids.wanted() && o_.values == nullptr) return invalid("top: both pointers are null");
      KERNELS_TRY(o_.ids.check("top: the pointer to ids is not aligned for its elements"));
      if (reinterpret_cast<uintptr_t>(o_.values) % alignof(float) != 0)
        return invalid("top: the pointer to log_probs is not aligned for its elements");
    }
    return {};
  }

 private:
  detail::LogProbOutputs o_;
};

// The options, in the order in which they apply to a row of logits before a token is drawn, which is that of Hugging
// Face's generate():
//
//   soft_cap(cap)                     cap * tanh(logit / cap); 0: none
//   bias(p, ld)                       adds p[row * ld + token], floats; ld 0: the same for all rows
//   repetition_penalty(r)             for tokens that occurred: logits below 0 times r, others divided by r
//   frequency_penalty(f), presence_penalty(p)   minus f times the number of occurrences, minus p
//   allowed(words, ld)                hides tokens whose bit is 0: bit token % 32 of words[row * ld + token / 32]
//   temperature(t)                    logits divided by t; 0: greedy, the largest logit's token, whatever the filters
//   top_k(k)                          keeps the k largest; 0, -1, or at least the vocabulary size: all
//   top_p(p)                          keeps the largest whose probabilities add up to p, at least one; 1: all
//   min_p(p)                          keeps those with at least p times the largest probability; 0: all
//   typical(p)                        keeps those with an information nearest to the entropy whose probabilities add up
//                                     to p; 1: all
//
// Tokens that occurred are given by previous(tokens, ld, lengths), the first lengths[row] entries of tokens[row * ld],
// which may contain numbers that are not tokens; or by counts(p, ld), where p[row * ld + token] is the number of
// occurrences; or by both. All penalties apply to all of them, as in generate(). With prompts(p), the first p[row]
// entries of previous() are the prompt, to which only repetition_penalty() applies, as in serving engines.
//
// A parameter is a number, or a pointer in the memory space in which the call runs: temperature(p) has one number for
// each row, temperature(p, stride) with stride 0 one for all rows. seed(s) and step(s) are parameters as well, and may
// change between replays of a graph. A row's draw depends on the seed, the step and, unless each row has its own seed,
// on the row's index.
//
// status(p): an array, in the memory space in which the call runs, that receives a Sampled for each row.
class Sampling {
 public:
  using Number = detail::RowValue<float>;
  Sampling() = default;
  template <class N, class = std::enable_if_t<std::is_arithmetic<N>::value>>
  Sampling(N) {
    static_assert(!std::is_arithmetic<N>::value,
                  "sample: a number where there must be options: k::Sampling{}.temperature(t)");
  }

  Sampling& temperature(Number v) { return set(o_.temperature, v); }
  Sampling& temperature(const float* p, int64_t stride) { return set(o_.temperature, {p, stride}); }
  Sampling& greedy() { return temperature(0); }
  Sampling& top_k(detail::RowValue<int32_t> v) { return set(o_.top_k, v); }
  Sampling& top_k(const int32_t* p, int64_t stride) { return set(o_.top_k, {p, stride}); }
  Sampling& top_p(Number v) { return set(o_.top_p, v); }
  Sampling& top_p(const float* p, int64_t stride) { return set(o_.top_p, {p, stride}); }
  Sampling& min_p(Number v) { return set(o_.min_p, v); }
  Sampling& min_p(const float* p, int64_t stride) { return set(o_.min_p, {p, stride}); }
  Sampling& typical(Number v) { return set(o_.typical, v); }
  Sampling& typical(const float* p, int64_t stride) { return set(o_.typical, {p, stride}); }
  Sampling& repetition_penalty(Number v) { return set(o_.repetition, v); }
  Sampling& repetition_penalty(const float* p, int64_t stride) { return set(o_.repetition, {p, stride}); }
  Sampling& presence_penalty(Number v) { return set(o_.presence, v); }
  Sampling& presence_penalty(const float* p, int64_t stride) { return set(o_.presence, {p, stride}); }
  Sampling& frequency_penalty(Number v) { return set(o_.frequency, v); }
  Sampling& frequency_penalty(const float* p, int64_t stride) { return set(o_.frequency, {p, stride}); }
  Sampling& seed(detail::RowValue<uint64_t> s) { return set(o_.seed, s); }
  Sampling& seed(const uint64_t* p, int64_t stride) { return set(o_.seed, {p, stride}); }
  Sampling& step(detail::RowValue<uint64_t> s) { return set(o_.step, s); }
  Sampling& step(const uint64_t* p, int64_t stride) { return set(o_.step, {p, stride}); }

  Sampling& soft_cap(float cap) { return set(o_.soft_cap, cap); }
  Sampling& bias(const float* p, int64_t ld) { o_.says_bias = true; return set(o_.bias, {p, ld}); }
  Sampling& allowed(const uint32_t* words, int64_t ld) { o_.says_allowed = true; return set(o_.allowed, {words, ld}); }
  Sampling& counts(const int32_t* p, int64_t ld) { o_.says_counts = true; return set(o_.counts, {p, ld}); }
  Sampling& previous(const int32_t* tokens, int64_t ld, const int32_t* lengths) {
    o_.says_previous = true;
    o_.lengths = lengths;
    return set(o_.previous, {tokens, ld});
  }
  Sampling& prompts(const int32_t* lengths) {
    o_.says_prompts = true;
    return set(o_.prompts, lengths);
  }
  Sampling& status(int32_t* p) { o_.says_status = true; return set(o_.status, p); }
  Sampling& status(Sampled* p) { return status(reinterpret_cast<int32_t*>(p)); }

  const detail::SampleOptions& options() const { return o_; }
  Status check(int64_t rows, int64_t vocabulary) const;

 private:
  template <class T>
  Sampling& set(T& what, const T& to) {
    what = to;
    return *this;
  }
  detail::SampleOptions o_;
};

namespace detail {

KERNELS_HD bool within_numbers(float x, float low, float high) { return x >= low && x <= high; }
constexpr float kMostFloat = 3.402823466e38f;

// The number of largest tokens that top_k keeps; 0: all.
KERNELS_HD int32_t kept_by(int32_t top_k, int64_t vocabulary) { return top_k > 0 && top_k < vocabulary ? top_k : 0; }

// The parameters of one row.
struct SampleRules {
  float temperature, top_p, min_p, typical, repetition, presence, frequency;
  int32_t top_k;

  KERNELS_HD SampleRules(const SampleOptions& o, int64_t row)
      : temperature(o.temperature.at(row)),
        top_p(o.top_p.at(row)),
        min_p(o.min_p.at(row)),
        typical(o.typical.at(row)),
        repetition(o.repetition.at(row)),
        presence(o.presence.at(row)),
        frequency(o.frequency.at(row)),
        top_k(o.top_k.at(row)) {}

  KERNELS_HD bool right() const {
    return within_numbers(temperature, 0.f, kMostFloat) && within_numbers(top_p, 0.f, 1.f) &&
           within_numbers(min_p, 0.f, 1.f) && within_numbers(typical, 0.f, 1.f) && repetition > 0.f &&
           repetition <= kMostFloat && within_numbers(presence, -kMostFloat, kMostFloat) &&
           within_numbers(frequency, -kMostFloat, kMostFloat) && top_k >= -1;
  }
};

inline Status check_vocabulary(int64_t rows, int64_t vocabulary) {
  if (rows < 0) return invalid("rows is negative");
  if (vocabulary < 0) return invalid("vocabulary is negative");
  if (vocabulary == 0 && rows > 0) return invalid("vocabulary is 0: there is no token to draw");
  if (vocabulary > kMostVocabulary) return unsupported("vocabulary is larger than 2^22");
  return {};
}
template <class T>
Status check_rows_of(const StridedRows<T>& from, int64_t rows, int64_t least, const char* null, const char* misaligned,
                     const char* stride, const char* too_far) {
  KERNELS_TRY(check_pointer(from.p, null, misaligned));
  if (from.ld < least && from.ld != 0) return invalid(stride);
  return rows_overflow<T>(rows, from.ld) ? invalid(too_far) : Status{};
}

}  // namespace detail

inline Status Sampling::check(int64_t rows, int64_t vocabulary) const {
  using detail::within_numbers;
  KERNELS_TRY(detail::check_vocabulary(rows, vocabulary));
#define KERNELS_POINTER(name, what)                                                                                   \
  KERNELS_TRY(o_.name.check(rows, what ": the pointer is null", what ": the pointer is not aligned for its elements", \
                            what ": the stride is negative", what ": rows x stride exceeds 64 bits"))
#define KERNELS_NUMBER(name, what, limits, right) \
  KERNELS_POINTER(name, what);                    \
  if (const auto v = o_.name.value(); !o_.name.on_device() && !(right)) return invalid(what " " limits)
  constexpr float most = detail::kMostFloat;
  KERNELS_NUMBER(temperature, "temperature", "is negative, infinite or NaN", within_numbers(v, 0.f, most));
  KERNELS_NUMBER(top_k, "top_k", "is less than -1", v >= -1);
  KERNELS_NUMBER(top_p, "top_p", "is not from 0 to 1", within_numbers(v, 0.f, 1.f));
  KERNELS_NUMBER(min_p, "min_p", "is not from 0 to 1", within_numbers(v, 0.f, 1.f));
  KERNELS_NUMBER(typical, "typical", "is not from 0 to 1", within_numbers(v, 0.f, 1.f));
  KERNELS_NUMBER(repetition, "repetition_penalty", "is not positive, or infinite", v > 0.f && v <= most);
  KERNELS_NUMBER(presence, "presence_penalty", "is infinite or NaN", within_numbers(v, -most, most));
  KERNELS_NUMBER(frequency, "frequency_penalty", "is infinite or NaN", within_numbers(v, -most, most));
  KERNELS_POINTER(seed, "seed");
  KERNELS_POINTER(step, "step");
#undef KERNELS_NUMBER
#undef KERNELS_POINTER
  if (!within_numbers(o_.soft_cap, 0.f, most)) return invalid("soft_cap is negative, infinite or NaN");
  if (rows == 0) return {};
  if (o_.says_bias) {
    KERNELS_TRY(check_rows_of(o_.bias, rows, vocabulary, "bias: the pointer is null",
                              "bias: the pointer is not aligned for its elements",
                              "bias: ld is neither 0 nor at least the vocabulary", "bias: rows x ld exceeds 64 bits"));
  }
  if (o_.says_allowed) {
    KERNELS_TRY(check_rows_of(o_.allowed, rows, (vocabulary + 31) / 32, "allowed: the pointer is null",
                              "allowed: the pointer is not aligned for its words",
                              "allowed: ld is neither 0 nor at least vocabulary / 32, rounded up",
                              "allowed: rows x ld exceeds 64 bits"));
  }
  if (o_.says_counts) {
    KERNELS_TRY(check_rows_of(o_.counts, rows, vocabulary, "counts: the pointer is null",
                              "counts: the pointer is not aligned for its elements",
                              "counts: ld is neither 0 nor at least the vocabulary",
                              "counts: rows x ld exceeds 64 bits"));
  }
  if (o_.says_previous) {
    KERNELS_TRY(check_rows_of(o_.previous, rows, 0, "previous: the pointer to tokens is null",
                              "previous: the pointer to tokens is not aligned for its elements",
                              "previous: ld is negative", "previous: rows x ld exceeds 64 bits"));
    KERNELS_TRY(detail::check_pointer(o_.lengths, "previous: the pointer to lengths is null",
                                      "previous: the pointer to lengths is not aligned for its elements"));
  }
  if (o_.says_prompts) {
    if (!o_.says_previous)
      return invalid("prompts: there is no previous(), of whose tokens the first are the prompt's");
    KERNELS_TRY(detail::check_pointer(o_.prompts, "prompts: the pointer is null",
                                      "prompts: the pointer is not aligned for its elements"));
  }
  const auto idle = [](const detail::RowValue<float>& v, float off) { return !v.on_device() && v.value() == off; };
  if (!o_.penalized() && !(idle(o_.repetition, 1.f) && idle(o_.presence, 0.f) && idle(o_.frequency, 0.f))) {
    return invalid("a penalty needs previous() or counts(): the tokens that occurred");
  }
  return o_.says_status ? detail::check_pointer(o_.status, "status: the pointer is null",
                                                "status: the pointer is not aligned for its elements")
                        : Status{};
}

KERNELS_END
