// Keys and values appended on the GPU to caches of codes, with the scales that are found for them: what the CPU's test
// asks for, and the CPU's own codes.
#include "support/gpu.cuh"

#include <kernels/elementwise.cuh>
#include <kernels/rmsnorm.cuh>
#include <kernels/cpu/elementwise.h>

#include "support/append.h"

using namespace test;
using D = DeviceMemory;

namespace {

struct Copy {
  template <class In, class Out>
  k::Status operator()(const In& in, const Out& out, int64_t rows, int64_t cols) const {
    const k::Status status = k::copy(stream, in, out, rows, cols);
    stream.wait();
    return status;
  }
  Stream stream;
};

template <class Code, class S, class T>
void check_found() {
  Tally t;
  check_append_found<Code, S, T, D>(t, Copy());
  CHECK_TALLY(t);
}

}  // namespace

TEST_CASE("append: int4, with scales of float") { check_found<k::Int4, float, float>(); }
TEST_CASE("append: int4, with scales of half") {
  check_found<k::Int4, k::half, float>();
  check_found<k::Int4, k::half, k::half>();
}
TEST_CASE("append: int4, with scales of bfloat16") {
  check_found<k::Int4, k::bfloat16, k::bfloat16>();
  check_found<k::Int4, k::bfloat16, int8_t>();
}
TEST_CASE("append: int8, with scales of all types") {
  check_found<int8_t, float, float>();
  check_found<int8_t, k::half, float>();
  check_found<int8_t, k::bfloat16, float>();
}
TEST_CASE("append: 8-bit floats, with scales of all types") {
  check_found<k::float8_e4m3, k::half, float>();
  check_found<k::float8_e4m3, k::bfloat16, float>();
  check_found<k::float8_e5m2, float, float>();
}
TEST_CASE("append: keys that are turned, with a plain copy") {
  Tally t;
  check_append_turned<D>(t, Copy());
  CHECK_TALLY(t);
}
TEST_CASE("append: behind an operation on whole rows") {
  Tally t;
  const Copy on;
  const auto norm = [&](const auto& in, const auto& out, int64_t rows, int64_t cols) {
    const k::Status status = k::rmsnorm(on.stream, in, out, rows, cols);
    on.stream.wait();
    return status;
  };
  check_append_normed<float, D>(t, norm);
  check_append_normed<k::half, D>(t, norm);
  CHECK_TALLY(t);
}

// The same functor objects, over memory that both reach.
TEST_CASE("append: the CPU makes the same codes of 4 bits") {
  const Copy copy;
  const int64_t tokens = 33, heads = 3;
  for (const int64_t dim : {64, 72, 128, 256}) {
    Pinned<k::half> x(tokens, heads * dim, heads * dim);
    Pinned<uint32_t> codes(1, tokens * heads * dim / 8, tokens * heads * dim / 8);
    Pinned<k::half> scales(1, tokens * heads, tokens * heads);
    Pinned<int32_t> positions(1, tokens, tokens);
    Random random(uint64_t(dim) + 1);
    for (int64_t r = 0; r < tokens; ++r) {
      positions.set(0, r, 0);
      for (int64_t c = 0; c < heads * dim; ++c) x.set(r, c, make<k::half>(random.normal()));
    }
    x.upload(), positions.upload();
    const auto before = codes.bytes();
    const auto side = k::nhd<k::Int4>(codes.data(), 1, heads, dim)
                          .scales(static_cast<const k::half*>(scales.data()), heads, heads, 1);
    const auto out = k::append_keys(k::dense_kv(side, side, 1), k::AppendAt(positions.data()), dim, scales.data());
    const auto in = k::load(static_cast<const k::half*>(x.data()), heads * dim);
    INFO("heads of " << dim);
    REQUIRE(copy(in, out, tokens, heads * dim));
    codes.download(), scales.download();
    const auto on_gpu = codes.bytes(), scales_on_gpu = scales.bytes();
    CHECK(on_gpu != before);
    codes.restore(before);
    REQUIRE(k::cpu::copy(k::cpu::Exec{1}, in, out, tokens, heads * dim));
    codes.download(), scales.download();
    CHECK(codes.bytes() == on_gpu);
    CHECK(scales.bytes() == scales_on_gpu);
  }
}
