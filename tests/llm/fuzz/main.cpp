// The same target without libFuzzer, for compilers that have none.
//   fuzz SECONDS SEED FILES...     reads the files, then changes of them for so long; FUZZ_FAILURE names the file for
//                                  an input that fails
//   fuzz seeds FOLDER GOLDEN       writes what golden files hold as inputs
#include <sanitizer/common_interface_defs.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "fuzz.h"
#include "text.h"

namespace {

std::string input;  // that is being read

void keep() {
  const char* const name = std::getenv("FUZZ_FAILURE");
  if (name != nullptr) std::ofstream(name, std::ios::binary) << input;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "seeds") == 0) {
    for (const auto& seed : fuzz::seeds(argv[3]))
      std::ofstream(std::string(argv[2]) + "/" + seed.first, std::ios::binary) << seed.second;
    return 0;
  }
  if (argc < 4) return std::fprintf(stderr, "fuzz SECONDS SEED FILES...\n"), 2;
  __sanitizer_set_death_callback(keep);
  for (const int signal : {SIGABRT, SIGALRM}) {
    std::signal(signal, [](int which) {
      keep();
      _exit(which == SIGALRM ? 75 : 76);
    });
  }
  std::vector<std::string> all;
  for (int i = 3; i < argc; ++i) all.push_back(llm::read_file(argv[i]));
  const auto one = [&] {
    alarm(20);
    fuzz::read(input);
  };
  for (const std::string& seed : all) input = seed, one();
  uint64_t state = std::strtoull(argv[2], nullptr, 10), count = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(argv[1]));
  for (; std::chrono::steady_clock::now() < end; ++count) {
    input = all[fuzz::random_bits(state) % all.size()];
    for (uint64_t n = fuzz::random_bits(state) % 3 + 1; n > 0; --n) input = fuzz::mutate(input, state);
    one();
  }
  alarm(0);
  std::printf("%zu files and %llu changes of them were read or refused\n", all.size(),
              static_cast<unsigned long long>(count));
  return 0;
}
