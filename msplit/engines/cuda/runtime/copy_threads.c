/* Copies bytes within the host's memory by several threads. `memcpy.py` calls it; `hatch_build.py` compiles it into the wheel.

   A copy is cut into pieces. The calling thread and the helpers take one after the other, so that a helper that does not get a processor
   delays nothing but the piece it holds. Helpers sleep between copies; for some µs after one they look for the next, since an array that is
   sent on in parts is copied by several calls. One copy has the helpers at a time: a thread that comes meanwhile copies by itself. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PIECE ((size_t)1 << 16)
#define LOOK_NS 30000 /* how long a helper looks for another copy before it sleeps: to wake one takes 10 to 40 µs */
#define PATIENCE 20000 /* looks, some 100 µs, before the caller lets others have its processor: one of them holds a piece */

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX() ((void)0)
#endif

static struct { char *to; const char *from; size_t size; } job;
static _Atomic uint32_t newest;     /* number of the newest copy: what helpers wait for */
static _Atomic uint64_t untaken;    /* number of a copy, and in the lower half how many of its pieces nobody has taken */
static _Atomic uint32_t left;       /* pieces that are not there yet */
static int helpers;                 /* threads that were started in this process */
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* Copies pieces of this copy, the last one first, until all are taken. Only who has taken a piece reads `job`: it stays until that is there. */
static void work(uint32_t number) {
  uint64_t at = atomic_load(&untaken);
  while ((uint32_t)(at >> 32) == number && (uint32_t)at) {
    if (!atomic_compare_exchange_weak(&untaken, &at, at - 1)) continue;
    size_t first = ((uint32_t)at - 1) * PIECE, size = job.size - first;
    memcpy(job.to + first, job.from + first, size < PIECE ? size : PIECE);
    atomic_fetch_sub(&left, 1);
    at = atomic_load(&untaken);
  }
}

static void *help(void *unused) {
  uint32_t seen = 0;
  for (;;) {
    int64_t end = now() + LOOK_NS;
    while (atomic_load(&newest) == seen) {
      if (now() < end) RELAX();
      else syscall(SYS_futex, &newest, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    }
    seen = atomic_load(&newest);
    work(seen);
  }
  return unused;
}

/* Threads do not survive a fork, and who held the turn may be one of them. */
static void after_fork(void) {
  helpers = 0;
  pthread_mutex_init(&turn, NULL);
}

__attribute__((constructor)) static void loaded(void) { pthread_atfork(NULL, NULL, after_fork); }

/* Copies `size` bytes with the help of up to `wanted` threads, and is back when they are there. Where no thread can be started, alone. */
void copy_threads(char *to, const char *from, size_t size, int wanted) {
  if (size <= PIECE || wanted < 1 || pthread_mutex_trylock(&turn)) {
    memcpy(to, from, size);
    return;
  }
  for (pthread_t thread; helpers < wanted && !pthread_create(&thread, NULL, help, NULL); helpers++) pthread_detach(thread);
  uint32_t number = atomic_load(&newest) + 1, pieces = (uint32_t)((size + PIECE - 1) / PIECE);
  job.to = to, job.from = from, job.size = size;
  atomic_store(&left, pieces);
  atomic_store(&untaken, (uint64_t)number << 32 | pieces);
  atomic_store(&newest, number);
  syscall(SYS_futex, &newest, FUTEX_WAKE_PRIVATE, wanted, NULL, NULL, 0);
  work(number);
  for (long looks = 0; atomic_load(&left); looks++) {
    if (looks < PATIENCE) RELAX();
    else sched_yield();
  }
  pthread_mutex_unlock(&turn);
}
