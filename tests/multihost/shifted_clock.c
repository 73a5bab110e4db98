/* A library to preload: the wall clock is ahead by the seconds in the file $CLOCK_OFFSET, an int64.

   Other clocks are right. Waits until a time of the wall clock end when the shifted clock shows it, as they do
   when a clock is set: they wake a hundred times a second to see. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

typedef long (*call)(long, ...);
typedef int (*wait_on)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static volatile int64_t none, *offset = &none;
static call real_syscall;
static wait_on real_wait;

static void find(void) {
    real_syscall = (call)dlsym(RTLD_NEXT, "syscall");
    void *newest = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* not the oldest, on x86 */
    real_wait = (wait_on)(newest ? newest : dlsym(RTLD_NEXT, "pthread_cond_timedwait"));
}

__attribute__((constructor)) static void begin(void) {
    find();
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    void *shared = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (shared != MAP_FAILED) offset = shared;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_syscall) find();
    int failed = real_syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}

/* The end of a slice of a wait, by the true clock; whether the shifted clock has reached the wait's end. */
static int slice(const struct timespec *end, struct timespec *next) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t left = (end->tv_sec - now.tv_sec) * 1000000000LL + end->tv_nsec - now.tv_nsec;
    int64_t step = left < 0 ? 0 : left < 10000000 ? left : 10000000;
    int64_t until = now.tv_nsec + step;
    next->tv_sec = now.tv_sec - *offset + until / 1000000000;
    next->tv_nsec = until % 1000000000;
    return left <= 0;
}

/* A time of the monotonic clock, which a condition variable may use, lies within decades of the boot. */
static int is_wall_time(const struct timespec *end) { return end && end->tv_sec > 1000000000; }

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *end) {
    struct timespec next;
    if (!is_wall_time(end)) return real_wait(condition, mutex, end);
    int over = slice(end, &next);
    int result = real_wait(condition, mutex, &next);
    return result == ETIMEDOUT && !over ? 0 : result; /* a spurious wake, which callers expect */
}

long syscall(long number, ...) {
    va_list list;
    long a[6];
    struct timespec next;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (!real_syscall) find();
    const struct timespec *end = (const struct timespec *)a[3];
    int timed = number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET;
    if (!timed || !(a[1] & FUTEX_CLOCK_REALTIME) || !is_wall_time(end))
        return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    int over = slice(end, &next);
    long result = real_syscall(number, a[0], a[1], a[2], (long)&next, a[4], a[5]);
    if (result == -1 && errno == ETIMEDOUT && !over) errno = EINTR;
    return result;
}
