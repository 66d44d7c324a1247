/* A long link between two network namespaces, as a pair of tun devices: packets take their time, wait in a queue
 * of bounded length, and get lost at random. For kernels without netem.
 *
 * long_link NAMESPACE NAMESPACE DEVICE BITS_PER_SECOND DELAY_US LOST_OF_A_MILLION QUEUE_US
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { PACKETS = 1 << 14, LONGEST = 2048 };

struct packet {
  int64_t due;
  int length;
  char bytes[LONGEST];
};

struct way {
  int from, to;
  int64_t free_at; /* when the link has sent what waits */
  uint64_t first, end;
  struct packet* packets;
};

static void fail(const char* what) {
  perror(what);
  exit(1);
}

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int device(const char* namespace, const char* name) {
  const int there = open(namespace, O_RDONLY);
  if (there < 0 || setns(there, CLONE_NEWNET) != 0) fail(namespace);
  close(there);
  const int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
  strncpy(request.ifr_name, name, sizeof request.ifr_name - 1);
  if (tun < 0 || ioctl(tun, TUNSETIFF, &request) != 0) fail("/dev/net/tun");
  return tun;
}

int main(int count, char** words) {
  if (count != 8) return 2;
  const int devices[] = {device(words[1], words[3]), device(words[2], words[3])};
  const double rate = atof(words[4]);
  const int64_t delay = atoll(words[5]) * 1000, lost = atoll(words[6]), queue = atoll(words[7]) * 1000;
  struct way ways[2];
  for (int i = 0; i < 2; ++i) {
    ways[i] = (struct way){devices[i], devices[1 - i], 0, 0, 0, malloc(sizeof(struct packet) * PACKETS)};
  }
  srandom(1);
  puts("ready");
  fflush(stdout);
  while (1) {
    int64_t next = INT64_MAX;
    for (int i = 0; i < 2; ++i) {
      struct way* way = &ways[i];
      const int64_t time = now();
      while (way->end - way->first < PACKETS) {
        struct packet* packet = &way->packets[way->end % PACKETS];
        packet->length = (int)read(way->from, packet->bytes, LONGEST);
        if (packet->length <= 0) break;
        const int64_t begun = way->free_at > time ? way->free_at : time;
        if (begun - time > queue || random() % 1000000 < lost) continue;
        way->free_at = begun + (int64_t)(packet->length * 8e9 / rate);
        packet->due = way->free_at + delay;
        ++way->end;
      }
      for (; way->first < way->end && way->packets[way->first % PACKETS].due <= time; ++way->first) {
        struct packet* packet = &way->packets[way->first % PACKETS];
        (void)!write(way->to, packet->bytes, (size_t)packet->length);
      }
      if (way->first < way->end && way->packets[way->first % PACKETS].due < next) {
        next = way->packets[way->first % PACKETS].due;
      }
    }
    struct pollfd polled[] = {{devices[0], POLLIN, 0}, {devices[1], POLLIN, 0}};
    struct timespec rest = {0, 0};
    const int64_t left = next - now();
    if (next != INT64_MAX && left > 0) rest.tv_nsec = left % 1000000000, rest.tv_sec = left / 1000000000;
    if (next == INT64_MAX || left > 0) ppoll(polled, 2, next == INT64_MAX ? NULL : &rest, NULL);
  }
}
