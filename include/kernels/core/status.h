// Status: what every call returns. A code and a static reason; nothing throws, prints or aborts.
//
//   kernels::Status s = kernels::softmax(stream, in, out, rows, cols);
//   if (!s) fprintf(stderr, "%s\n", s.reason());
#pragma once

#include "macros.h"

KERNELS_SHARED_BEGIN

enum class Code {
  ok,
  invalid,      // an argument is wrong: null, negative, overlapping, overflowing
  unsupported,  // the arguments are right, but no path serves this combination
  device,       // the CUDA runtime refused; native() is its cudaError_t
};

class [[nodiscard]] Status {
 public:
  KERNELS_INLINE constexpr Status() = default;
  KERNELS_INLINE constexpr Status(Code code, const char* reason, int native = 0) : code_(code), native_(native), reason_(reason) {}

  KERNELS_INLINE constexpr bool ok() const { return code_ == Code::ok; }
  KERNELS_INLINE constexpr explicit operator bool() const { return ok(); }
  KERNELS_INLINE constexpr Code code() const { return code_; }
  KERNELS_INLINE constexpr int native() const { return native_; }
  KERNELS_INLINE constexpr const char* reason() const { return reason_; }

 private:
  Code code_ = Code::ok;
  int native_ = 0;
  const char* reason_ = "ok";
};

KERNELS_INLINE constexpr Status invalid(const char* reason) { return {Code::invalid, reason}; }
KERNELS_INLINE constexpr Status unsupported(const char* reason) { return {Code::unsupported, reason}; }

// Leaves the calling function with the first failure.
#define KERNELS_TRY(expression)                                     \
  do {                                                              \
    if (::kernels::Status kernels_status = (expression); !kernels_status) return kernels_status; \
  } while (false)

KERNELS_SHARED_END
