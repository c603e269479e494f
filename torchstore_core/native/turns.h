/* Turns: threads that copy for long let those run that wait for their processor.
 *
 * The scheduler of Linux lets a thread finish its slice, 3 ms or more, before one that has just woken.
 * Where as many threads copy as there are processors, a small request of another process waits for that
 * twice, in its client and in the server. To yield costs about a microsecond where nobody waits.
 *
 * But who yields forfeits the rest of the slice (Linux 6.18): beside a thread that never sleeps, one
 * that yields all the time gets 1 to 3 % of the processor. So one that got it back late, because of
 * such a thread, does not yield again for a multiple of that time.
 */
#ifndef TORCHSTORE_TURNS_H
#define TORCHSTORE_TURNS_H
#include <stddef.h>

/* Bytes that are copied between two looks at the clock. */
#define STEP ((size_t)64 << 10)

/* Yields if it is time to; called after every STEP. */
extern void torchstore_take_turns(void);

/* The same where pieces are smaller: ``since`` counts their bytes. */
static inline void take_turns_after(size_t nbytes, size_t *since) {
    *since += nbytes;
    if (*since < STEP) return;
    *since = 0;
    torchstore_take_turns();
}
#endif
