// Routing on the GPU: choices and weights against double, the order of rows, a layer of experts, graphs, and the CPU's
// version of the same calls.
#include "support/gpu_products.cuh"

#include <kernels/cpu/router.h>
#include <kernels/elementwise.cuh>
#include <kernels/router.cuh>

#include "support/router.h"

using namespace test;

namespace {

// Memory for sorting, with a guard behind it.
struct SortRoom {
  explicit SortRoom(const k::RouterShape& shape)
      : bytes(k::sort_workspace_bytes(shape)), memory(1, int64_t(bytes / 4) + 1, int64_t(bytes / 4) + 1) {}
  k::Workspace workspace() const { return bytes > 0 ? k::Workspace{memory.data(), bytes} : k::Workspace{}; }
  size_t bytes;
  Device<int32_t> memory;
};

// Not a part of the class below: with Catch2 3.4 and g++ 13, cudafe++ of CUDA 13.0 never ended over a check there.
void check_intact(Device<int32_t>& memory) {
  memory.download();
  CHECK(memory.intact());
}

struct Calls {
  const Stream& stream;

  k::Status done(const k::Status& status) const { return stream.wait(), status; }
  template <class Logits>
  k::Status route(const Logits& logits, int32_t* ids, float* weights, const k::RouterShape& shape,
                  const k::Router& options) const {
    return done(k::route(k::Exec(stream), logits, ids, weights, shape, options));
  }
  k::Status sort(const int32_t* ids, const k::ExpertOrder& to, const k::RouterShape& shape) const {
    SortRoom room(shape);
    const k::Status status = done(k::sort_by_expert(k::Exec(stream), ids, to, shape, room.workspace()));
    check_intact(room.memory);
    return status;
  }
  template <class X, class W, class Out>
  k::Status matmul(const X& x, const W& w, const Out& out, const k::MatmulShape& shape, const k::Groups& groups) const {
    return done(k::matmul(k::Exec(stream), x, w, out, shape, groups));
  }
  template <class In, class Out>
  k::Status copy(const In& in, const Out& out, int64_t rows, int64_t cols) const {
    return done(k::copy(k::Exec(stream), in, out, rows, cols));
  }
};

}  // namespace

TEST_CASE("router: which experts, and their weights") {
  Tally t;
  Stream stream;
  const Calls calls{stream};
  check_routings<DeviceMemory>(t, [&](const auto&... all) { return calls.route(all...); });
  CHECK_TALLY(t);
}

TEST_CASE("router: more tokens than blocks take at once") {
  Tally t;
  Stream stream;
  const Calls calls{stream};
  Random random(3);
  check_routing<k::half, DeviceMemory>(
      t, {"many tokens", 5003, 128, 8, 's', true, false, 1, 1, false, 1, 0, -1, 0.5},
      [&](int64_t, int64_t) { return 0.5 * std::round(4 * random.normal()); },
      [&](const auto&... all) { return calls.route(all...); });
  CHECK_TALLY(t);
}

TEST_CASE("router: rows in the order of their experts") {
  Tally t;
  Stream stream;
  const Calls calls{stream};
  check_sortings<DeviceMemory>(t, [&](const auto&... all) { return calls.sort(all...); });
  CHECK_TALLY(t);
}

TEST_CASE("router: a layer of experts") {
  Tally t;
  Stream stream;
  for (const Routing& c : layers()) check_layer<float, DeviceMemory>(t, c, 24, 40, Calls{stream});
  // Rows that tensor cores' tiles copy as they lie, and others.
  check_layer<k::half, DeviceMemory>(t, layers()[0], 64, 40, Calls{stream});
  check_layer<k::half, DeviceMemory>(t, layers()[3], 33, 19, Calls{stream});
  CHECK_TALLY(t);
}

// 150 groups, most of them empty: blocks look for theirs 32 at a time.
TEST_CASE("router: many groups") {
  Tally t;
  Stream stream;
  check_layer<float, DeviceMemory>(t, {"many", 300, 150, 2, 's', true}, 16, 8, Calls{stream});
  CHECK_TALLY(t);
}

TEST_CASE("router: the same bits on the CPU, in a graph, and early") {
  const k::RouterShape shape{3001, 96, 6};
  const int64_t choices = shape.tokens * shape.top_k;
  const RandomMatrix<float, DeviceMemory> logits(9, shape.tokens, shape.experts, shape.experts);
  const RandomMatrix<float> same(9, shape.tokens, shape.experts, shape.experts);
  const auto options = k::Router{}.renormalize().groups(6, 3);
  const auto run = [&](bool graph, bool programmatic) {
    Stream stream;
    Device<int32_t> ids(1, choices, choices), offsets(1, shape.experts + 1, shape.experts + 1),
        order(1, choices, choices), places(1, choices, choices);
    Device<float> weights(1, choices, choices);
    const SortRoom room(shape);
    const auto exec = k::Exec(stream).programmatic(programmatic);
    k::Status routed, sorted;
    run_in(stream, graph, [&] {
      routed = k::route(exec, k::load(static_cast<const float*>(logits.data()), shape.experts), ids.data(),
                        weights.data(), shape, options);
      sorted =
          k::sort_by_expert(exec, ids.data(), {offsets.data(), order.data(), places.data()}, shape, room.workspace());
    });
    CHECK(routed.ok());
    CHECK(sorted.ok());
    ids.download(), weights.download(), offsets.download(), order.download(), places.download();
    std::vector<int32_t> all;
    for (int64_t i = 0; i < choices; ++i)
      all.push_back(ids.get(0, i)), all.push_back(order.get(0, i)), all.push_back(places.get(0, i)),
          all.push_back(k::bit_cast<int32_t>(weights.get(0, i)));
    for (int64_t e = 0; e <= shape.experts; ++e) all.push_back(offsets.get(0, e));
    return all;
  };
  const auto plain = run(false, false);
  CHECK(plain == run(false, true));
  CHECK(plain == run(true, false));
  CHECK(plain == run(true, true));

  std::vector<int32_t> ids(static_cast<size_t>(choices)), offsets(static_cast<size_t>(shape.experts + 1)), order(ids),
      places(ids);
  std::vector<float> weights(static_cast<size_t>(choices));
  CHECK(k::cpu::route(k::cpu::Exec{2}, k::load(static_cast<const float*>(same.data()), shape.experts), ids.data(),
                      weights.data(), shape, options));
  CHECK(k::cpu::sort_by_expert(k::cpu::Exec{2}, ids.data(), {offsets.data(), order.data(), places.data()}, shape));
  Tally t;
  for (int64_t i = 0; i < choices; ++i) {
    const size_t at = size_t(i);
    t.expect(plain[4 * at] == ids[at] && plain[4 * at + 1] == order[at] && plain[4 * at + 2] == places[at],
             "choice %d differs", int(i));
    const float weight = k::bit_cast<float>(plain[4 * at + 3]);
    t.expect(std::fabs(weight - weights[at]) <= 4e-6f * weights[at], "choice %d has weight %g, on the CPU %g", int(i),
             double(weight), double(weights[at]));
  }
  CHECK_TALLY(t);
}

TEST_CASE("router: what it refuses") {
  Stream stream;
  Device<float> p(1, 1024, 1024);
  Device<int32_t> i(1, 70000, 70000);
  const auto logits = k::load(static_cast<const float*>(p.data()), 8);
  CHECK(std::string(k::route(stream, logits, i.data(), p.data(), {2, 8, 9}).reason()) ==
        "route: top_k exceeds experts");
  CHECK(std::string(k::route(stream, logits, nullptr, p.data(), {2, 8, 2}).reason()) ==
        "route: ids: the pointer is null");
  const k::RouterShape large{8193, 8, 2};
  const k::ExpertOrder to{i.data() + 20000, i.data() + 30000, i.data() + 50000};
  CHECK(k::sort_workspace_bytes({8192, 8, 2}) == 0);
  CHECK(k::sort_workspace_bytes(large) > 0);
  const size_t bytes = k::sort_workspace_bytes(large);
  const std::string needed = " bytes, and " + std::to_string(bytes) + " are needed";
  CHECK(std::string(k::sort_by_expert(stream, i.data(), to, large).reason()) ==
        "sort_by_expert: the workspace has 0" + needed);
  CHECK(std::string(k::sort_by_expert(stream, i.data(), to, large, {i.data(), bytes - 1}).reason()) ==
        "sort_by_expert: the workspace has " + std::to_string(bytes - 1) + needed);
  CHECK(std::string(k::sort_by_expert(stream, i.data(), to, large, {reinterpret_cast<char*>(i.data()) + 1, 1 << 20})
                        .reason()) == "sort_by_expert: the workspace is not at a multiple of 4 bytes");
  CHECK(i.unchanged());
}
