// Calls both units, which came in by linking: as objects or as shared libraries.
#include <cstdio>

extern "C" int link_a();
extern "C" int link_b();

int main() {
  for (int round = 0; round < 2; ++round) {
    const int a = link_a(), b = link_b();
    if (a == 77 || b == 77) return 77;
    if (a != 0 || b != 0) return 1;
  }
  std::puts("both units give the right results");
}
