// Status: the result of every call, a code and a reason. Nothing throws, prints or aborts.
//
//   kernels::Status s = kernels::softmax(stream, in, out, rows, cols);
//   if (!s) fprintf(stderr, "%s\n", s.reason());
#pragma once

#include <cstdint>

#include "macros.h"

KERNELS_SHARED_BEGIN

enum class Code {
  ok,
  invalid,      // an argument is wrong: null, negative, overlapping, overflowing
  unsupported,  // the arguments are right, but no path serves this combination
  device,       // a CUDA runtime error; native() is the cudaError_t
};

class [[nodiscard]] Status {
 public:
  KERNELS_INLINE constexpr Status() = default;
  KERNELS_INLINE constexpr Status(Code code, const char* reason, int native = 0)
      : code_(code), native_(native), reason_(reason) {}

  KERNELS_INLINE constexpr bool ok() const { return code_ == Code::ok; }
  KERNELS_INLINE constexpr explicit operator bool() const { return ok(); }
  KERNELS_INLINE constexpr Code code() const { return code_; }
  KERNELS_INLINE constexpr int native() const { return native_; }
  // Valid until this thread calls reason() of another Status: print or copy it before.
  KERNELS_INLINE constexpr const char* reason() const {
    return call_ == nullptr && argument_ == nullptr && part_ == nullptr ? reason_ : named();
  }

  // The same status with the name of the argument (below: of the call) that it is about.
  KERNELS_INLINE constexpr Status of(const char* argument) const {
    Status out = *this;
    if (!ok()) out.argument_ = argument;
    return out;
  }
  // With the part of the argument, such as a map's operand. Of nested parts the innermost is kept.
  KERNELS_INLINE constexpr Status within(const char* part) const {
    Status out = *this;
    if (!ok() && part_ == nullptr) out.part_ = part;
    return out;
  }
  // A reason that already begins with the call's name is kept as it is.
  KERNELS_INLINE constexpr Status in(const char* call) const {
    Status out = *this;
    if (!ok() && !begins_with(call)) out.call_ = call;
    return out;
  }

 private:
  KERNELS_INLINE constexpr bool begins_with(const char* call) const {
    const char* reason = reason_;
    while (*call != 0 && *call == *reason) ++call, ++reason;
    return *call == 0 && *reason == ':';
  }
  // "call: argument: part: reason", without those that are null.
  KERNELS_INLINE const char* named() const {
    static thread_local char text[256];
    char *to = text, *const end = text + sizeof(text) - 1;
    const char* const parts[] = {call_, argument_, part_, reason_};
    for (const char* part : parts) {
      if (part == nullptr) continue;
      for (const char* from = part; *from != 0 && to < end; ++from) *to++ = *from;
      for (const char* from = part == reason_ ? "" : ": "; *from != 0 && to < end; ++from) *to++ = *from;
    }
    *to = 0;
    return text;
  }

  Code code_ = Code::ok;
  int native_ = 0;
  const char* reason_ = "ok";
  const char *part_ = nullptr, *argument_ = nullptr, *call_ = nullptr;
};

KERNELS_INLINE constexpr Status invalid(const char* reason) { return {Code::invalid, reason}; }
KERNELS_INLINE constexpr Status unsupported(const char* reason) { return {Code::unsupported, reason}; }

// Returns the first failure from the calling function.
#define KERNELS_TRY(expression)                                     \
  do {                                                              \
    if (::kernels::Status kernels_status = (expression); !kernels_status) return kernels_status; \
  } while (false)

KERNELS_SHARED_END

KERNELS_BEGIN
namespace detail {
// Checks that p is not null and is aligned for T.
template <class T>
Status check_pointer(const T* p, const char* null, const char* misaligned) {
  if (p == nullptr) return invalid(null);
  return reinterpret_cast<uintptr_t>(p) % alignof(T) == 0 ? Status{} : invalid(misaligned);
}

// Whether so many rows, `ld` elements apart, exceed 63 bits of bytes. rows is not negative here.
template <class T>
bool rows_overflow(int64_t rows, int64_t ld) {
  const int64_t limit = INT64_MAX / int64_t(sizeof(T));
  return ld > 0 && rows > limit / ld;
}
}  // namespace detail
KERNELS_END
