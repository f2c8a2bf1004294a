// dlopen local|global LIBRARY_A LIBRARY_B: loads both units into one process, then calls them.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int visibility = std::strcmp(argv[1], "global") == 0 ? RTLD_GLOBAL : RTLD_LOCAL;
  using Call = int (*)();
  Call calls[2];
  const char* const names[2] = {"link_a", "link_b"};
  for (int i = 0; i < 2; ++i) {
    void* library = dlopen(argv[2 + i], RTLD_NOW | visibility);
    void* symbol = library ? dlsym(library, names[i]) : nullptr;
    if (!symbol) {
      std::printf("%s\n", dlerror());
      return 1;
    }
    std::memcpy(&calls[i], &symbol, sizeof(symbol));
  }
  for (int round = 0; round < 2; ++round) {
    for (const Call call : calls) {
      const int result = call();
      if (result != 0) return result == 77 ? 77 : 1;
    }
  }
  std::puts("both libraries give the right results");
}
