// What sampling on the GPU and on the CPU share: the options, the arithmetic that decides, and the search for the token itself.
//
// Both draw the same token from the same logits and the same seed, whatever the number of threads or blocks, because nothing that
// decides is rounded twice. A logit becomes an integer, its level: how far it lies below the largest logit of its row, in units of
// 2^-24 of a factor of two. The level's weight is 2^40 2^(-level / 2^24), in integers as well, so that sums of weights do not depend
// on their order. A token more than a factor of 2^40 behind the likeliest one has no weight.
//
// Tokens are ordered by their logits, the largest first, those with the same logit by their ids, the lowest first. Every filter keeps
// a beginning of that order (but typical(), which has an order of its own). The draw is the first token at which the weights so far exceed
// a random share of their sum: in that order if there is a top_k() of up to kFew, otherwise in that of ids, in which a row need not be
// sorted. Nor is it for top_p() alone: a token is drawn from all, and again from those ahead of it until it is one that top_p() keeps.
#pragma once

#include <cmath>
#include <limits>

#include "arguments.h"
#include "philox.h"

KERNELS_BEGIN

// What is said of each row, where Sampling{}.status(p) asks for it. All but ok come with token -1.
enum class Sampled : int32_t {
  ok,
  nan,        // one of the row's logits is NaN
  none,       // no token is allowed: every logit is -infinity, or hidden by allowed()
  parameter,  // a parameter that lies on the device is outside its limits
};

namespace detail {

// A parameter: one number for all rows, or a pointer to those of the rows, `stride` apart.
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
  Status check(const char* null, const char* misaligned) const { return on_device_ ? check_pointer(p_, null, misaligned) : Status{}; }

 private:
  template <class A>
  static T narrow(A value) {
    if constexpr (std::is_integral<T>::value && std::is_signed<T>::value) {
      const int64_t wide = int64_t(value), most = std::numeric_limits<T>::max();
      return wide > most ? T(most) : wide < -1 ? T(-1) : T(wide);
    } else {
      return static_cast<T>(value);
    }
  }

  T value_ = T();
  const T* p_ = nullptr;
  int64_t stride_ = 0;
  bool on_device_ = false;
};

// ---- numbers that come out the same on the CPU and the GPU -------------------------------------------------------------

// One operation, rounded once, which no compiler makes one of with the next. A double holds a product of floats, and their sum or
// quotient rounded to it rounds to the right float.
KERNELS_HD float add_once(float a, float b) {
#if defined(KERNELS_DEVICE_CODE)
  return __fadd_rn(a, b);
#else
  return float(double(a) + double(b));
#endif
}
KERNELS_HD float times_once(float a, float b) {
#if defined(KERNELS_DEVICE_CODE)
  return __fmul_rn(a, b);
#else
  return float(double(a) * double(b));
#endif
}
KERNELS_HD float over_once(float a, float b) {
#if defined(KERNELS_DEVICE_CODE)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
KERNELS_HD double times_once(double a, double b) {
#if defined(KERNELS_DEVICE_CODE)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

KERNELS_HD uint32_t high_product(uint32_t a, uint32_t b) {
#if defined(KERNELS_DEVICE_CODE)
  return __umulhi(a, b);
#else
  return uint32_t(uint64_t(a) * b >> 32);
#endif
}
KERNELS_HD uint64_t high_product(uint64_t a, uint64_t b) {
#if defined(KERNELS_DEVICE_CODE)
  return __umul64hi(a, b);
#else
  const uint64_t a0 = uint32_t(a), a1 = a >> 32, b0 = uint32_t(b), b1 = b >> 32;
  const uint64_t middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + uint32_t(middle);
  return a1 * b1 + (middle >> 32) + (other >> 32);
#endif
}

// Floats as integers of the same order. -0 is 0; a NaN, whatever its sign, is above all others.
constexpr uint32_t kNanKey = 0xffffffffu, kLowestKey = 0x007fffffu;  // -infinity
KERNELS_HD uint32_t key_of(float x) {
  const uint32_t bits = x == 0.f ? 0u : bit_cast<uint32_t>(x);
  const uint32_t key = bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
  return x != x ? kNanKey : key;
}
KERNELS_HD float logit_of(uint32_t key) {
  return bit_cast<float>(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

constexpr int kLevelBits = 24, kWeightBits = 40;
constexpr uint32_t kNoLevel = uint32_t(kWeightBits) << kLevelBits;  // the largest level, which has no weight
constexpr int64_t kMostVocabulary = int64_t(1) << 22;                   // sums of weights have 62 bits

// What 2^(1 - f) has above 1, in units of 2^-32, for the fraction f of a level: g (a1 + g (a2 + ...)) with g = 1 - f, good to 2^-23.
KERNELS_HD uint32_t power_of(uint32_t level) {
  const uint32_t g = ~(level << (32 - kLevelBits));
  uint32_t p = high_product(0x7a5d3fu, g) + 0x24ef0aau;
  p = high_product(p, g) + 0xe48e732u;
  p = high_product(p, g) + 0x3d7b6adbu;
  p = high_product(p, g) + 0xb1725d47u;
  return high_product(p, g);
}
KERNELS_HD uint64_t weight_of(uint32_t level) {
  return (uint64_t(1) << 32 | power_of(level)) << (kWeightBits - 33) >> (level >> kLevelBits);
}

// The last level that has at least this weight, which the first one has.
KERNELS_HD uint32_t last_level_of(uint64_t weight) {
  uint32_t last = 0;
  KERNELS_ROLLED
  for (uint32_t step = 1u << 29; step > 0; step >>= 1) {
    if (last + step <= kNoLevel && weight_of(last + step) >= weight) last += step;
  }
  return last;
}

// The levels of a row, in which no logit is above the top.
struct Levels {
  float top, scale;
  KERNELS_HD Levels(uint32_t top_key, float temperature) : top(logit_of(top_key)), scale(over_once(24204406.f, temperature)) {}  // 2^24 / ln 2
  KERNELS_HD uint32_t of(float x) const {
    const float below = (top - x) * scale;  // NaN where both are infinite
#if defined(KERNELS_DEVICE_CODE)
    return lesser(__float2uint_rz(below), kNoLevel);  // which makes 0 of NaN, and the largest number of those above it
#else
    return below < float(kNoLevel) ? uint32_t(int32_t(below)) : x == top ? 0u : kNoLevel;
#endif
  }
  KERNELS_HD uint32_t operator()(uint32_t key) const { return of(logit_of(key)); }
};

// cap * tanh(x / cap), good to 2^-24 of the cap.
KERNELS_HD float capped(float x, float cap) {
  const float z = over_once(x, cap), a = magnitude(z);
  if (!(a < 16.f)) return x != x ? x : copy_sign(cap, x);
  const uint32_t level = uint32_t(int32_t(a * 48408812.f));  // exp(-2a), 2 2^24 / ln 2
  const uint32_t one = 1u << 30, power = level == 0 ? one : level >> kLevelBits > 29 ? 0u : (one + (power_of(level) >> 2)) >> (1 + (level >> kLevelBits));
  return copy_sign(times_once(cap, over_once(float(one - power), float(one + power))), x);
}

// Where ids of tokens are written, or read: int32_t or int64_t.
class TokenOutput {
 public:
  TokenOutput() = default;
  template <class T>
  TokenOutput(T* p) : to_(const_cast<std::remove_const_t<T>*>(p)), wide_(sizeof(T) == sizeof(int64_t)) {
    static_assert(std::is_integral<T>::value && std::is_signed<T>::value && sizeof(T) >= 4, "tokens are numbers of 32 or 64 bits with a sign");
  }

  KERNELS_HD bool wanted() const { return to_ != nullptr; }
  Status check(const char* misaligned) const {
    return reinterpret_cast<uintptr_t>(to_) % (wide_ ? alignof(int64_t) : alignof(int32_t)) == 0 ? Status{} : invalid(misaligned);
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
struct RowsOf {
  const T* p = nullptr;
  int64_t ld = 0;
  KERNELS_HD const T* at(int64_t row) const { return p + row * ld; }
};

struct SampleOptions {
  RowValue<float> temperature = 1.f, top_p = 1.f, min_p = 0.f, typical = 1.f;
  RowValue<float> repetition = 1.f, presence = 0.f, frequency = 0.f;
  RowValue<int32_t> top_k = 0;
  RowValue<uint64_t> seed = 0, step = 0;
  float soft_cap = 0.f;
  RowsOf<float> bias;
  RowsOf<uint32_t> allowed;
  RowsOf<int32_t> counts, previous;
  const int32_t* lengths = nullptr;
  bool says_bias = false, says_allowed = false, says_counts = false, says_previous = false, says_status = false;
  int32_t* status = nullptr;

  KERNELS_HD bool penalized() const { return counts.p != nullptr || previous.p != nullptr; }
  KERNELS_HD bool adjusted() const { return soft_cap > 0.f || bias.p != nullptr || allowed.p != nullptr || penalized(); }
};

// Logarithms of a row's probabilities: of its largest logits, and of one token.
class LogProbOutputs {
 public:
  TokenOutput chosen, ids;
  float *log_probs = nullptr, *values = nullptr;
  int64_t count = 0, ld = 0;
  bool says_chosen = false, says_top = false;
};

// A drafter that is certain of its token, and one whose probabilities are known.
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

// Drafted tokens of sequences: rows of a matrix of int32_t or int64_t, and the probabilities that the drafter had for all tokens of the
// vocabulary, a source whose row sequence * drafts + i is that of draft i. Without them the drafter is taken to have been certain, as one
// is that looks tokens up. A token that is none, such as -1, ends a sequence's drafts before it.
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

// What log_probs() gives: k::LogProbs{}.of(tokens, log_probs) those of one token of each row; .top(n, ids, log_probs, ld) the n largest of
// each row, n up to 256, in order, with their ids. A null pointer to ids or log_probs of top(): not wanted.
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
      KERNELS_TRY(detail::check_pointer(o_.log_probs, "of: the pointer to log_probs is null", "of: the pointer to log_probs is not aligned for its elements"));
    }
    if (o_.count > 0) {
      if (o_.ld < o_.count) return invalid("top: ld is less than n");
      if (!o_.ids.wanted() && o_.values == nullptr) return invalid("top: both pointers are null");
      KERNELS_TRY(o_.ids.check("top: the pointer to ids is not aligned for its elements"));
      if (reinterpret_cast<uintptr_t>(o_.values) % alignof(float) != 0) return invalid("top: the pointer to log_probs is not aligned for its elements");
    }
    return {};
  }

 private:
  detail::LogProbOutputs o_;
};

// What happens to a row of logits before a token is drawn from it, in this order, which is that of Hugging Face's generate():
//
//   soft_cap(cap)                     cap * tanh(logit / cap); 0: none
//   bias(p, ld)                       adds p[row * ld + token], floats; ld 0: the same for all rows
//   repetition_penalty(r)             for tokens that occurred: logits below 0 times r, others divided by it
//   frequency_penalty(f), presence_penalty(p)   minus f times how often they occurred, minus p
//   allowed(words, ld)                hides tokens whose bit is 0: bit token % 32 of words[row * ld + token / 32]
//   temperature(t)                    logits divided by t; 0: the largest logit's token, whatever the filters
//   top_k(k)                          the k largest; 0: all
//   top_p(p)                          the largest whose probabilities add up to p; one at least; 1: all
//   min_p(p)                          those with at least p times the largest probability; 0: all
//   typical(p)                        those with an information nearest to the entropy whose probabilities add up to p; 1: all
//
// Tokens that occurred: previous(tokens, ld, lengths), the first lengths[row] of tokens[row * ld], in which numbers that are no token
// are passed over, or counts(p, ld), which is how often each token of the vocabulary did, p[row * ld + token]; or both.
//
// Parameters are numbers, or pointers to one for each row where the call runs, (p) or (p, stride): with a stride of 0 one number there
// is for all rows. So are seed(s) and step(s), which may change between replays of a graph. A row's draw depends on the seed, the step
// and, unless each row has a seed of its own, on its number.
//
// Arrays where the call runs: status(p) gets a Sampled for each row.
class Sampling {
 public:
  using Number = detail::RowValue<float>;
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

// The parameters of one row.
struct SampleRules {
  float temperature, top_p, min_p, typical, repetition, presence, frequency;
  int32_t top_k;

  KERNELS_HD SampleRules(const SampleOptions& o, int64_t row)
      : temperature(o.temperature.at(row)), top_p(o.top_p.at(row)), min_p(o.min_p.at(row)), typical(o.typical.at(row)),
        repetition(o.repetition.at(row)), presence(o.presence.at(row)), frequency(o.frequency.at(row)), top_k(o.top_k.at(row)) {}

  KERNELS_HD bool right(int64_t vocabulary) const {
    return within_numbers(temperature, 0.f, kMostFloat) && within_numbers(top_p, 0.f, 1.f) && within_numbers(min_p, 0.f, 1.f) &&
           within_numbers(typical, 0.f, 1.f) && repetition > 0.f && repetition <= kMostFloat &&
           within_numbers(presence, -kMostFloat, kMostFloat) && within_numbers(frequency, -kMostFloat, kMostFloat) && top_k >= 0 &&
           top_k <= vocabulary;
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
Status check_rows_of(const RowsOf<T>& rows, int64_t least, const char* null, const char* misaligned, const char* stride, bool repeats) {
  KERNELS_TRY(check_pointer(rows.p, null, misaligned));
  return rows.ld >= least || (repeats && rows.ld == 0) ? Status{} : invalid(stride);
}

}  // namespace detail

inline Status Sampling::check(int64_t rows, int64_t vocabulary) const {
  using detail::within_numbers;
  KERNELS_TRY(detail::check_vocabulary(rows, vocabulary));
#define KERNELS_NUMBER(name, what, limits, right)                                                     \
  KERNELS_TRY(o_.name.check(what ": the pointer is null", what ": the pointer is not aligned for its elements")); \
  if (const auto v = o_.name.value(); !o_.name.on_device() && !(right)) return invalid(what " " limits)
  constexpr float most = detail::kMostFloat;
  KERNELS_NUMBER(temperature, "temperature", "is negative, infinite or NaN", within_numbers(v, 0.f, most));
  KERNELS_NUMBER(top_k, "top_k", "is negative, or larger than the vocabulary", v >= 0 && (v <= vocabulary || rows == 0));
  KERNELS_NUMBER(top_p, "top_p", "is not from 0 to 1", within_numbers(v, 0.f, 1.f));
  KERNELS_NUMBER(min_p, "min_p", "is not from 0 to 1", within_numbers(v, 0.f, 1.f));
  KERNELS_NUMBER(typical, "typical", "is not from 0 to 1", within_numbers(v, 0.f, 1.f));
  KERNELS_NUMBER(repetition, "repetition_penalty", "is not positive, or infinite", v > 0.f && v <= most);
  KERNELS_NUMBER(presence, "presence_penalty", "is infinite or NaN", within_numbers(v, -most, most));
  KERNELS_NUMBER(frequency, "frequency_penalty", "is infinite or NaN", within_numbers(v, -most, most));
#undef KERNELS_NUMBER
  KERNELS_TRY(o_.seed.check("seed: the pointer is null", "seed: the pointer is not aligned for its elements"));
  KERNELS_TRY(o_.step.check("step: the pointer is null", "step: the pointer is not aligned for its elements"));
  if (!within_numbers(o_.soft_cap, 0.f, most)) return invalid("soft_cap is negative, infinite or NaN");
  if (rows == 0) return {};
  if (o_.says_bias) {
    KERNELS_TRY(check_rows_of(o_.bias, vocabulary, "bias: the pointer is null", "bias: the pointer is not aligned for its elements",
                              "bias: ld is neither 0 nor at least the vocabulary", true));
  }
  if (o_.says_allowed) {
    KERNELS_TRY(check_rows_of(o_.allowed, (vocabulary + 31) / 32, "allowed: the pointer is null", "allowed: the pointer is not aligned for its words",
                              "allowed: ld is neither 0 nor at least vocabulary / 32, rounded up", true));
  }
  if (o_.says_counts) {
    KERNELS_TRY(check_rows_of(o_.counts, vocabulary, "counts: the pointer is null", "counts: the pointer is not aligned for its elements",
                              "counts: ld is neither 0 nor at least the vocabulary", true));
  }
  if (o_.says_previous) {
    KERNELS_TRY(check_rows_of(o_.previous, 0, "previous: the pointer to tokens is null", "previous: the pointer to tokens is not aligned for its elements",
                              "previous: ld is negative", true));
    KERNELS_TRY(detail::check_pointer(o_.lengths, "previous: the pointer to lengths is null", "previous: the pointer to lengths is not aligned for its elements"));
  }
  const auto idle = [](const detail::RowValue<float>& v, float off) { return !v.on_device() && v.value() == off; };
  if (!o_.penalized() && !(idle(o_.repetition, 1.f) && idle(o_.presence, 0.f) && idle(o_.frequency, 0.f))) {
    return invalid("a penalty needs previous() or counts(): the tokens that occurred");
  }
  return o_.says_status ? detail::check_pointer(o_.status, "status: the pointer is null", "status: the pointer is not aligned for its elements") : Status{};
}

namespace detail {

// A logit as the filters see it.
struct Adjust {
  const float* bias;
  const uint32_t* allowed;
  const int32_t* counts;
  float soft_cap, repetition, presence, frequency;

  KERNELS_HD Adjust(const SampleOptions& o, const SampleRules& rules, int64_t row)
      : bias(o.bias.p == nullptr ? nullptr : o.bias.at(row)), allowed(o.allowed.p == nullptr ? nullptr : o.allowed.at(row)),
        counts(o.counts.p == nullptr ? nullptr : o.counts.at(row)), soft_cap(o.soft_cap), repetition(rules.repetition),
        presence(rules.presence), frequency(rules.frequency) {}

  // count: how often the token occurs in the list of previous ones.
  KERNELS_HD float operator()(float x, int64_t id, int64_t count) const {
    if (allowed != nullptr && (allowed[id >> 5] >> (id & 31) & 1u) == 0) return -infinity<float>();
    if (soft_cap > 0.f) x = capped(x, soft_cap);
    if (bias != nullptr) x = add_once(x, bias[id]);
    if (counts != nullptr) count += counts[id];
    if (count > 0) {
      x = x < 0.f ? times_once(x, repetition) : over_once(x, repetition);
      x = add_once(add_once(x, -times_once(frequency, float(count))), -presence);
    }
    return x;
  }
};

// ---- the search --------------------------------------------------------------------------------------------------------
//
// It is written once, for a Row that says how a row is gone through and which threads work on it:
//
//   look(want, floor)      the largest key of the row, and a floor that at least `want` tokens reach (0: none is known)
//   visit(from, what)      what(key, id) for the row's tokens, shared among the threads; those below `from` may be left out
//   list(from)             append(entry, key) for the tokens that are not below
//   bin(i, mass)           counts a token in one of kBins bins; clear_bins() before, gather_bins() after
//   append(entry, key)     to the list, of which no more than kFew are kept
//   sums(what, result)     the four sums of what each thread adds to row.sum(i, value) meanwhile
//   weigh(what)            the sum of what.mass_left(key, id) over the row's tokens
//   find(what, target)     behind it: shared().edge is the first token in the order of ids at which the sum so far exceeds the target
//   shared()               what all threads see
//   leads(), is_first()    whether this thread is of the block that works on it between two sync(), or the first one of all
//   block()                that block: shared(), each(n, f), count(n, f), sum(n, f), scan(n, get, put), ranks(n, entries, put)

constexpr int kFew = 1024, kMostListed = 256, kBins = 1024, kBinBits = 10, kFirstShift = 20, kIdBits = 22;

struct SampleShared {
  uint64_t entries[kFew], sorted[kFew], weights[kFew];
  uint64_t mass[2 * kFew];
  uint64_t sums[4];
  uint64_t left, edge;
  uint32_t keys[kFew];
  uint32_t count[kBins];
  uint32_t listed, bin, bin_count;
};

// An entry: what orders a token, larger is earlier, and its id, lower is earlier.
KERNELS_HD uint64_t entry_of(uint32_t first, uint32_t id) { return uint64_t(first) << 32 | uint32_t(~id); }
KERNELS_HD uint32_t id_of(uint64_t entry) { return ~uint32_t(entry); }
KERNELS_HD uint32_t first_of_entry(uint64_t entry) { return uint32_t(entry >> 32); }
KERNELS_HD uint64_t short_entry(uint32_t first, uint32_t id) { return uint64_t(first) << kIdBits | (uint32_t(kMostVocabulary - 1) - id); }

// A share of a sum.
KERNELS_HD uint64_t share_of(float p, uint64_t total) {
  const uint64_t share = uint64_t(times_once(double(p), double(total)));
  return share < 1 ? 1 : share > total ? total : share;
}

// What a token needs, whose probability is p times the largest one.
KERNELS_HD uint64_t least_weight_of(float p) { return share_of(p, weight_of(0)); }

enum class Stage : int { top_k, top_p, typical, draw, none };

// Which tokens are left.
struct Kept {
  uint64_t least = uint64_t(kLowestKey + 1) << 32;  // entry, by logit
  uint64_t least_weight = 0;
  uint64_t nearest = 0;                             // entry, by distance from the center
  uint32_t center = 0;
  bool by_distance = false;

  KERNELS_HD uint32_t distance(uint32_t level) const { return level > center ? level - center : center - level; }
  KERNELS_HD bool has(uint32_t key, uint32_t id, uint32_t level) const {
    if (entry_of(key, id) < least) return false;
    if (least_weight > 0 && weight_of(level) < least_weight) return false;
    return !by_distance || entry_of(~distance(level), id) >= nearest;
  }
};

// No draft: tokens are drawn by their own weights.
struct NoDraft {
  KERNELS_HD static constexpr bool drafted() { return false; }
  KERNELS_HD bool is(uint32_t) const { return false; }
  KERNELS_HD uint64_t rest(uint32_t, uint64_t weight) const { return weight; }
  KERNELS_HD bool accepts(uint64_t, uint64_t) { return false; }
  KERNELS_HD void give_up() {}
};

// A token that a drafter proposed, with the probabilities that it had: q. With p the target's, it is accepted with probability p / q, and
// otherwise a token is drawn by what p has more than q. In weights: q's are shares of the sum of p's.
template <class Q>
class DraftOf {
 public:
  KERNELS_HD DraftOf(const Q& q, int64_t row, int64_t token, int64_t vocabulary, uint64_t draw)
      : q_(&q), row_(row), token_(token >= 0 && token < vocabulary ? uint32_t(token) : ~0u), draw_(draw) {}

  KERNELS_HD bool drafted() const { return token_ != ~0u; }
  KERNELS_HD bool is(uint32_t id) const { return id == token_; }
  // Whether the token is accepted, that has so much of the total weight.
  KERNELS_HD bool accepts(uint64_t weight, uint64_t total) {
    total_ = total;
    return drafted() && high_product(draw_, share(token_)) < weight;
  }
  // What is left of a token's weight where the draft is not accepted.
  KERNELS_HD uint64_t rest(uint32_t id, uint64_t weight) const {
    if (!drafted() || weight == 0) return weight;
    const uint64_t other = share(id);
    return weight > other ? weight - other : 0;
  }
  // Nothing is left where p is q to the last bit; then the draft is as good as always accepted.
  KERNELS_HD void give_up() { token_ = ~0u; }

 private:
  KERNELS_HD uint64_t share(uint32_t id) const {
    const float q = q_->at(row_, id, token_);
    return q > 0.f ? uint64_t(times_once(double(q < 1.f ? q : 1.f), double(total_))) : 0;
  }
  const Q* q_;
  int64_t row_;
  uint32_t token_;
  uint64_t draw_, total_ = 0;
};

// What is done with each token of a row.
template <class Draft>
struct Visit {
  enum What { listing, binning, summing };
  What what = listing;
  Stage stage = Stage::none;
  Kept kept;
  Levels levels;
  Draft draft;
  // Of the search within a stage: the bin of the first round, if there was one, and the bits of the entry that are known.
  bool narrowed = false;
  uint32_t first_bin = 0;
  int shift = 0;
  uint64_t known = 0;

  KERNELS_HD Visit(const Levels& l, const Draft& d) : levels(l), draft(d) {}

  KERNELS_HD uint32_t first(uint32_t key, uint32_t level) const { return stage == Stage::typical ? ~kept.distance(level) : key; }
  KERNELS_HD uint32_t bin_of(uint32_t level) const { return (stage == Stage::typical ? kept.distance(level) : level) >> kFirstShift; }
  KERNELS_HD uint64_t mass(uint32_t id, uint32_t level) const {
    if (stage == Stage::top_k) return 1;
    const uint64_t weight = weight_of(level);
    return stage == Stage::draw ? draft.rest(id, weight) : weight;
  }

  KERNELS_HD uint64_t mass_left(uint32_t key, uint32_t id) const {
    const uint32_t level = levels(key);
    return kept.has(key, id, level) ? mass(id, level) : 0;
  }

  template <class Row>
  KERNELS_HD void operator()(Row& row, uint32_t key, uint32_t id) const {
    const uint32_t level = levels(key);
    if (!kept.has(key, id, level)) return;
    if (what == summing) {
      const uint64_t weight = weight_of(level), product = weight * level;  // below 2^63
      row.sum(0, weight);
      row.sum(1, uint32_t(product));
      row.sum(2, product >> 32);
      if (draft.is(id)) row.sum(3, weight);
      return;
    }
    if (narrowed && bin_of(level) != first_bin) return;
    const uint64_t entry = short_entry(first(key, level), id);
    if (what == listing) {
      if (!narrowed || shift >= 64 || entry >> shift == known) row.append(entry_of(first(key, level), id), key);
      return;
    }
    if (narrowed && entry >> (shift + kBinBits) != known) return;
    row.bin(narrowed ? kBins - 1 - int(entry >> shift & (kBins - 1)) : int(bin_of(level)), mass(id, level));
  }
};

// The mean level, by weight, of which the sums above are made: sum 1 + 2^32 sum 2 over sum 0.
KERNELS_HD uint32_t mean_level(uint64_t weights, uint64_t low, uint64_t high) {
  // Long division, bit by bit: the quotient has no more than 30.
  high += low >> 32;
  low &= 0xffffffffu;
  uint64_t rest = high % weights;
  uint32_t quotient = 0;  // high / weights is 0: the mean is below 2^32
  for (int bit = 31; bit >= 0; --bit) {
    rest = rest << 1 | (low >> bit & 1u);
    quotient <<= 1;
    if (rest >= weights) rest -= weights, quotient |= 1u;
  }
  return quotient;
}

// Of the tokens in the order of a stage, the one at which the masses so far first reach the budget, budget_of(their sum): it is in
// shared().edge then.
//
// The first round's bins are of a 16th of a factor of two. If the bin in question holds too many for a list, such as many equal
// logits, it is searched by the bits of its entries.
template <class Row, class V, class Budget>
KERNELS_HD void select(Row& row, V visit, const Budget& budget_of) {
  SampleShared& s = row.shared();
  uint64_t budget = 0;
  visit.narrowed = false;
  visit.shift = 64;
  KERNELS_ROLLED
  for (int round = 0;; ++round) {
    visit.what = V::binning;
    row.clear_bins();
    row.visit(0, visit);
    row.gather_bins();
    if (row.leads()) {
      auto& block = row.block();
      SampleShared& s = block.shared();
      const uint64_t sum = block.scan(kBins, [&s](int i) { return s.mass[i]; }, [&s](int i, uint64_t before) { s.mass[i] = before; });
      if (round == 0) budget = budget_of(sum);
      block.each(kBins, [&s, sum, budget](int i) {
        if (i == 0) s.listed = 0;
        const uint64_t before = s.mass[i], after = i + 1 < kBins ? s.mass[i + 1] : sum;
        if (before < budget && budget <= after) s.bin = uint32_t(i), s.bin_count = s.count[i], s.left = budget - before;
      });
    }
    row.sync();
    budget = s.left;
    if (round == 0) visit.narrowed = true, visit.first_bin = s.bin, visit.known = 0;
    else visit.known = visit.known << kBinBits | (kBins - 1 - s.bin);
    if (s.bin_count <= uint32_t(kFew)) break;
    visit.shift = round == 0 ? 5 * kBinBits : visit.shift - kBinBits;
  }
  visit.what = V::listing;
  row.visit(0, visit);
  row.sync();
  if (row.leads()) {
    auto& block = row.block();
    SampleShared& s = block.shared();
    const int n = int(s.listed);
    block.ranks(n, s.entries, [&s, &visit](int i, int rank) {
      s.sorted[rank] = s.entries[i];
      s.weights[rank] = visit.mass(id_of(s.entries[i]), visit.levels(s.keys[i]));
    });
    block.scan(n, [&s](int i) { return s.weights[i]; }, [&s](int i, uint64_t before) { s.mass[i] = before; });
    block.each(n, [&s, budget](int i) {
      if (i == 0) s.listed = 0;
      if (s.mass[i] < budget && budget <= s.mass[i] + s.weights[i]) s.edge = s.sorted[i];
    });
  }
  row.sync();
}

// The same for tokens that are all in the list, among which the k largest are: they are brought in order, with their weights, ...
template <class Block>
KERNELS_HD void rank_listed(Block& block, const Levels& levels) {
  SampleShared& s = block.shared();
  block.ranks(int(s.listed), s.entries, [&s, &levels](int i, int rank) {
    s.sorted[rank] = s.entries[i];
    s.weights[rank] = weight_of(levels(first_of_entry(s.entries[i])));
  });
}

// ... and those that are left are the first n of them, until typical() leaves some of these out.
struct Ranked {
  int n;
  uint64_t total;
};
template <class Block>
KERNELS_HD uint64_t sum_ranked(Block& block, int n) {
  SampleShared& s = block.shared();
  return block.scan(n, [&s](int i) { return s.weights[i]; }, [&s](int i, uint64_t before) { s.mass[i] = before; });
}
template <class Block>
KERNELS_HD Ranked keep_first(Block& block, int k, const SampleRules& rules) {
  SampleShared& s = block.shared();
  Ranked left;
  left.n = lesser(k, int(s.listed));
  left.total = sum_ranked(block, left.n);
  const auto shorten = [&](const auto& keeps) {
    left.n = block.count(left.n, keeps);
    left.total = s.mass[left.n - 1] + s.weights[left.n - 1];
  };
  if (rules.top_p < 1.f) {
    const uint64_t share = share_of(rules.top_p, left.total);
    shorten([&s, share](int i) { return s.mass[i] < share; });
  }
  if (rules.min_p > 0.f) {
    const uint64_t least = least_weight_of(rules.min_p);
    shorten([&s, least](int i) { return s.weights[i] >= least; });
  }
  return left;
}
template <class Block>
KERNELS_HD void draw_ranked(Block& block, const Ranked& left, uint64_t draw) {
  SampleShared& s = block.shared();
  const uint64_t target = high_product(draw, left.total);
  block.each(left.n, [&s, target](int i) {
    if (s.mass[i] <= target && target < s.mass[i] + s.weights[i]) s.edge = s.sorted[i];
  });
}

// Every filter, and the draw. True: the draft is accepted.
template <class Block, class V>
KERNELS_HD bool choose_listed(Block& block, int k, const SampleRules& rules, V& visit, uint64_t draw) {
  SampleShared& s = block.shared();
  rank_listed(block, visit.levels);
  Ranked left = keep_first(block, k, rules);
  const int n = left.n;
  if (rules.typical < 1.f) {
    const auto product = [&s, &visit](int i) { return s.weights[i] * visit.levels(first_of_entry(s.sorted[i])); };
    const uint64_t low = block.sum(n, [&product](int i) { return uint64_t(uint32_t(product(i))); });
    const uint64_t high = block.sum(n, [&product](int i) { return product(i) >> 32; });
    Kept kept;
    kept.center = mean_level(left.total, low, high);
    block.each(n, [&s, &kept, &visit](int i) {
      const uint64_t entry = s.sorted[i];
      s.entries[i] = entry_of(~kept.distance(visit.levels(first_of_entry(entry))), id_of(entry));
    });
    uint64_t* const by_distance = s.mass + kFew;
    block.ranks(n, s.entries, [&s, by_distance](int i, int rank) {
      s.count[i] = uint32_t(rank);
      by_distance[rank] = s.weights[i];
    });
    block.scan(n, [by_distance](int i) { return by_distance[i]; }, [by_distance](int i, uint64_t before) { by_distance[i] = before; });
    const uint64_t share = share_of(rules.typical, left.total);
    block.each(n, [&s, by_distance, share](int i) {
      if (by_distance[s.count[i]] >= share) s.weights[i] = 0;
    });
    left.total = sum_ranked(block, n);
  }
  if (visit.draft.drafted()) {
    const auto& draft = visit.draft;
    const uint64_t drafted = block.sum(n, [&s, &draft](int i) { return draft.is(id_of(s.sorted[i])) ? s.weights[i] : 0; });
    if (visit.draft.accepts(drafted, left.total)) return true;
    const auto rest = [&s, &draft](int i) { return draft.rest(id_of(s.sorted[i]), s.weights[i]); };
    if (block.sum(n, rest) > 0) {
      block.each(n, [&s, &rest](int i) { s.weights[i] = rest(i); });
      left.total = sum_ranked(block, n);
    }
  }
  draw_ranked(block, left, draw);
  return false;
}

// The random numbers of a row: for its token, and for whether a draft is accepted; and those of further tries.
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

KERNELS_HD void write_sampled(const SampleOptions& o, const TokenOutput& tokens, int64_t number, Sampled status, int64_t token) {
  tokens.write(number, token);
  if (o.status != nullptr) o.status[number] = int32_t(status);
}

// Draws a token in the order of ids: shared().edge. top_p: of those that are kept so far, unless it is 1. No token that it keeps is behind
// one that it does not, so what was drawn in vain need not be looked at again, nor what is behind.
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
    } else if (mass == 0) {  // nothing is left where a draft has all that the row has
      visit.draft.give_up();
      continue;
    }
    row.find(visit, high_product(draw.token, mass));
    if (share == 0) return;
    drawn = true;
    visit.kept.least = row.shared().edge + 1;
  }
}

// A token for one row, or kAccepted. `number`: where the token is written.
template <class Row, class Draft>
KERNELS_HD void sample_row(Row& row, const SampleOptions& o, const SampleRules& rules, int64_t number, int64_t vocabulary, const TokenOutput& tokens, const RowDraw& draw,
                           const Draft& draft) {
  const auto conclude = [&](Sampled status, int64_t token) {
    if (row.is_first()) write_sampled(o, tokens, number, status, token);
  };
  if (!rules.right(vocabulary)) return conclude(Sampled::parameter, kNoToken);

  const int k = rules.temperature == 0.f ? 1 : rules.top_k > 0 && rules.top_k < vocabulary ? rules.top_k : 0;
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
  // The drafts and typical() are about the probabilities of what top_p() keeps.
  const bool exactly = rules.typical < 1.f || visit.draft.drafted();
  KERNELS_ROLLED
  for (int i = 0; !listed && i < int(Stage::draw); ++i) {
    const Stage stage = visit.stage = Stage(i);
    if (stage == Stage::typical && exactly && rules.min_p > 0.f) visit.kept.least_weight = least_weight_of(rules.min_p);
    const bool wanted = stage == Stage::top_k ? k > 0 : stage == Stage::top_p ? exactly && rules.top_p < 1.f : rules.typical < 1.f;
    if (!wanted) continue;
    if (stage == Stage::typical) {
      uint64_t sums[4];
      visit.what = V::summing;
      row.sums(visit, sums);
      visit.kept.center = mean_level(sums[0], sums[1], sums[2]);
    }
    select(row, visit, [&](uint64_t total) {
      return stage == Stage::top_k ? lesser(uint64_t(k), total) : share_of(stage == Stage::top_p ? rules.top_p : rules.typical, total);
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
  if (listed) {
    if (row.leads() && choose_listed(row.block(), k, rules, visit, draw.token)) return conclude(Sampled::ok, kAccepted);
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
  if (!row.leads()) return;
  const auto log_prob = [top, right, log_total](uint32_t key) {
    const float x = logit_of(key), most = logit_of(top);
    if (top == kNanKey || key == kNanKey) return logit_of(kNanKey);
    return x == most && right ? float(-log_total) : x <= -infinity<float>() ? x : float(double(x) - double(most) - log_total);
  };
  auto& block = row.block();
  SampleShared& mine = block.shared();
  if (k > 0) {
    const int listed = right ? int(mine.listed) : 0;
    block.ranks(listed, mine.entries, [&mine](int i, int rank) { mine.sorted[rank] = mine.entries[i]; });
    block.each(k, [&](int i) {
      const int64_t at = number * out.ld + i;
      if (out.ids.wanted()) out.ids.write(at, i < listed ? int64_t(id_of(mine.sorted[i])) : kNoToken);
      if (out.values != nullptr) out.values[at] = log_prob(top == kNanKey ? kNanKey : i < listed ? first_of_entry(mine.sorted[i]) : kLowestKey);
    });
  }
  if (out.says_chosen && row.is_first()) {
    const int64_t token = out.chosen.read(number);
    out.log_probs[number] = log_prob(token >= 0 && token < vocabulary ? row.key_at(token) : kNanKey);
  }
}

// ---- what is done with each row, by whoever drives them ------------------------------------------------------------------

template <class Source_>
struct SampleProblem {
  using Source = Source_;
  static constexpr bool kOnlyDraws = true;  // sample_row() without a draft
  Source source;
  int64_t rows, vocabulary;  // before the options, which calls that need few of these do not wait for
  TokenOutput tokens;
  SampleOptions options;

  KERNELS_HD SampleRules rules(int64_t row) const { return SampleRules(options, row); }
  template <class Row>
  KERNELS_HD void solve(Row& one, const SampleRules& rules, int64_t row) const {
    sample_row(one, options, rules, row, vocabulary, tokens, RowDraw(options, row, 0), NoDraft{});
  }
};

// Row r is that of sequence r / (drafts + 1), behind r % (drafts + 1) of its drafted tokens.
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
    sample_row(one, options, rules, row, vocabulary, tokens, draw, DraftOf<Q>(q, sequence * drafts + place, token, vocabulary, draw.draft));
  }
  // Once all rows are there.
  KERNELS_HD void finish(int64_t sequence) const {
    const int64_t first = sequence * (drafts + 1);
    int64_t count = 0;
    for (; count < drafts && tokens.read(first + count) == kAccepted; ++count) tokens.write(first + count, drafted.read(sequence * drafted_ld + count));
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

// What calls check before they do anything.
template <class Load>
constexpr bool takes_logits() {
  constexpr bool right = takes_source<Load>();
  if constexpr (right) {
    static_assert(!has_effects<Load>, "sampling reads logits more than once, and tee() or another effect must happen once: write them with copy() before");
    static_assert(!loaded_once<Load>, "sampling reads logits more than once, and a load in OneFlow's form runs once: give it a reload");
    return !has_effects<Load> && !loaded_once<Load>;
  } else {
    return false;
  }
}
template <class Load>
Status check_sample(const Load& logits, const TokenOutput& tokens, int64_t rows, int64_t vocabulary, const Sampling& options) {
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
  return check_pointer(p.accepted, "accepted: the pointer is null", "accepted: the pointer is not aligned for its elements");
}
template <class Load>
Status check_score(const Load& logits, const LogProbs& options, int64_t rows, int64_t vocabulary) {
  KERNELS_TRY(check_vocabulary(rows, vocabulary));
  KERNELS_TRY(options.check(rows));
  return rows == 0 ? Status{} : check_of(logits, rows, vocabulary).of("logits");
}
}  // namespace detail
KERNELS_END
