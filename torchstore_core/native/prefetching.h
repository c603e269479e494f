/* How memory that is read once is requested before it is needed.
 *
 * On AMD (Zen 5), what goes into the first cache alone (NTA) comes fastest: streaming copies have 28 GB/s
 * a core with it, and 13 to 18 without. Intel (Granite Rapids) has few requests under way for that cache,
 * and many more for the second one (T2): two cores copy 9 GB/s with NTA, 22 without, and 25 with T2, and
 * hash 11, 23 and 28. Others are taken to be like Intel, because what NTA costs there is more.
 */
#ifndef TORCHSTORE_PREFETCHING_H
#define TORCHSTORE_PREFETCHING_H
#if defined(__x86_64__)
#include <immintrin.h>

/* Whether it goes into the first cache alone. */
static inline int prefetches_alone(void) { return __builtin_cpu_is("amd") != 0; }

/* ``alone``: see above. */
static inline __attribute__((always_inline)) void prefetch_once(const char *address, int alone) {
    if (alone) _mm_prefetch(address, _MM_HINT_NTA);
    else _mm_prefetch(address, _MM_HINT_T2);
}
#endif
#endif
