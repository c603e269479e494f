/* See turns.h. */
#include "turns.h"

#include <sched.h>
#include <stdint.h>
#include <time.h>

/* Nanoseconds from one turn to the next. */
#define TURN 100000
/* A thread that ran for longer than this meanwhile does not seem to sleep; and for how many times as
 * long this one then keeps its processor, as far as the scheduler lets it. */
#define LATE 1000000
#define PATIENCE 16

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void torchstore_take_turns(void) {
    static _Thread_local int64_t next;
    int64_t now = nanoseconds();
    if (now < next) return;
    sched_yield();
    int64_t back = nanoseconds();
    next = back + (back - now > LATE ? PATIENCE * (back - now) : TURN);
}
