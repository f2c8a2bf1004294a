// How many threads the program takes by itself: one for each core, whatever CPUs these are for Linux.
#include <kernels/cpu/exec.h>

#include <map>

#include "device/device.h"
#include "support/catch.h"

namespace {

int cores(const std::map<int, std::string>& siblings) {
  std::vector<int> cpus;
  for (const auto& item : siblings) cpus.push_back(item.first);
  return llm::count_cores(cpus, [&](int cpu) { return siblings.at(cpu); });
}

}  // namespace

TEST_CASE("CPUs are counted by their cores") {
  CHECK(cores({{0, "0"}, {1, "1"}}) == 2);
  CHECK(cores({{0, "0-1"}, {1, "0-1"}, {2, "2-3"}, {3, "2-3"}}) == 2);
  CHECK(cores({{0, "0,64"}, {1, "1,65"}, {64, "0,64"}, {65, "1,65"}}) == 2);
  CHECK(cores({{0, "0-1,8-9"}, {1, "0-1,8-9\n"}, {8, "0-1,8-9"}, {9, "0-1,8-9"}, {16, "16"}}) == 2);
  CHECK(cores({{64, "0,64"}, {65, "1,65"}}) == 2);  // of each core the process may use one CPU, and not the first
  CHECK(cores({{1, "0-1"}, {2, "2-3"}, {3, "2-3"}}) == 2);
}

TEST_CASE("cores that are not known are not counted") {
  CHECK(cores({}) == 0);
  for (const char* list :
       {"", "\n", "x", "1", "0,", ",0", "0-", "0-0", "1-0", "0 1", "0,0", "0x", "-1", "0;1", "0-1-2", "99999999999"}) {
    INFO(list);
    CHECK(cores({{0, list}}) == 0);
    CHECK(cores({{0, list}, {7, "7"}}) == 0);
  }
}

TEST_CASE("a thread for each core is no more than the process may use") {
  const auto threads = [](int given) { return llm::make_cpu(given)->place().threads; };
  CHECK(threads(0) >= 1);
  CHECK(threads(0) <= kernels::cpu::Exec{}.threads());
  CHECK(threads(3) == 3);
}
