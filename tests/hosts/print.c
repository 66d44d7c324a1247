/* print RANK LINES: so many lines, one each millisecond, and at the end what that took: CPU and wall-clock
 * seconds. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double seconds(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

int main(int count, char** arguments) {
  long lines = atol(arguments[2]);
  struct timespec next;
  clock_gettime(CLOCK_MONOTONIC, &next);
  double begin = seconds(CLOCK_MONOTONIC);
  setvbuf(stdout, NULL, _IOLBF, 0);
  for (long i = 0; i < lines; i++) {
    printf("line %s %ld: what a worker prints of a step\n", arguments[1], i);
    if ((next.tv_nsec += 1000000) >= 1000000000) {
      next.tv_nsec -= 1000000000;
      next.tv_sec++;
    }
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
  }
  printf("took %s %f %f\n", arguments[1], seconds(CLOCK_PROCESS_CPUTIME_ID),
         seconds(CLOCK_MONOTONIC) - begin);
}
