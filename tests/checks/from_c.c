// Calls the functions of docs/building.md, as a program in C that has no header of the library. Those of the GPU are
// called without memory, which is refused whether there is a GPU or not.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

int engine_softmax(void* stream, const void* x, void* y, int64_t rows, int64_t cols, char* why, size_t room);
int engine_softmax_cpu(int threads, const float* x, float* y, int64_t rows, int64_t cols, char* why, size_t room);

int main(void) {
  char why[200] = "";
#if defined(ON_GPU)
  const int refused = engine_softmax(NULL, NULL, NULL, 2, 4, why, sizeof why);
#else
  const float x[8] = {0, 0, 0, 0, 1, 1, -100, -100};
  const float want[8] = {0.25f, 0.25f, 0.25f, 0.25f, 0.5f, 0.5f, 0, 0};
  float y[8];
  if (engine_softmax_cpu(2, x, y, 2, 4, why, sizeof why) != 0) {
    printf("softmax: %s\n", why);
    return 1;
  }
  for (int i = 0; i < 8; ++i) {
    if (fabsf(y[i] - want[i]) > 1e-6f) {
      printf("softmax: %g, want %g\n", y[i], want[i]);
      return 1;
    }
  }
  const int refused = engine_softmax_cpu(2, NULL, y, 2, 4, why, sizeof why);
#endif
  printf("%d: %s\n", refused, why);
  return refused != 0 && strstr(why, "null") != NULL ? 0 : 1;
}
