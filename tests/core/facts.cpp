// What many threads find out at the same time is kept once for each key, and read whole.
#include <kernels/core/facts.h>

#include <atomic>
#include <thread>
#include <vector>

#include "support/catch.h"

namespace k = kernels;

namespace {

struct Fact {
  int key, twice, from;  // the thread that found it out
};

}  // namespace

TEST_CASE("facts: nothing, one, another, and the first that was kept") {
  k::detail::Facts<int, Fact> facts;
  CHECK(facts.find(1) == nullptr);
  const Fact& one = facts.keep(1, {1, 2, 10});
  CHECK(facts.find(1) == &one);
  CHECK(facts.find(2) == nullptr);
  const Fact& two = facts.keep(2, {2, 4, 20});
  CHECK(&facts.keep(1, {1, 2, 30}) == &one);
  CHECK(facts.find(1) == &one);
  CHECK(facts.find(2) == &two);
  CHECK((one.from == 10 && two.from == 20));
}

TEST_CASE("facts: threads that miss the same keys at the same time agree") {
  constexpr int kThreads = 8, kKeys = 50, kRounds = 20;
  for (int round = 0; round < kRounds; ++round) {
    k::detail::Facts<int, Fact> facts;
    std::vector<std::vector<const Fact*>> seen(kThreads, std::vector<const Fact*>(kKeys));
    std::atomic<int> ready{0}, wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        ++ready;
        while (ready < kThreads) std::this_thread::yield();
        for (int i = 0; i < kKeys; ++i) {
          const int key = (i * 7 + t % 2 * 25) % kKeys;  // from two places of the same sequence
          const Fact* fact = facts.find(key);
          if (fact == nullptr) fact = &facts.keep(key, {key, 2 * key, t});
          if (fact->key != key || fact->twice != 2 * key) ++wrong;
          seen[size_t(t)][size_t(key)] = fact;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    for (int key = 0; key < kKeys; ++key) {
      for (int t = 1; t < kThreads; ++t) CHECK(seen[size_t(t)][size_t(key)] == seen[0][size_t(key)]);
      CHECK(facts.find(key) == seen[0][size_t(key)]);
    }
  }
}
