/* XXH3 (128 bits, no seed, the default secret) of several ranges of memory at once, which may be copied
 * on the way, with the GIL released.
 *
 * One core reads several ranges in turn faster than one after the other, because more requests are
 * under way. What is hashed is in registers, from where it is stored past the cache: a copy that is
 * hashed takes about as long as a copy.
 *
 * The algorithm is that of xxHash (Yann Collet), for more than 240 bytes: stripes of 64 bytes are
 * added to eight accumulators, which are scrambled after every 16 stripes.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include "prefetching.h"
#include "turns.h"

/* Ranges of which one after the other has a turn. */
#define LANES 2
#define STRIPE 64
#define STRIPES 16
/* Blocks of stripes of a turn where nothing is copied (a copy takes turns after each), and how far ahead
 * of them is prefetched. Where that would be for the first cache alone, a copy leaves it to the hardware:
 * its own stores are in the way of further requests. */
#define TURN 4
#define AHEAD 8192
#define DIGEST 16
/* Shorter ranges have other formulas. */
#define SHORTEST 241

#define AVX2 __attribute__((target("avx2")))
#define INLINED static inline __attribute__((always_inline, target("avx2")))

static const uint64_t primes[5] = {0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9,
                                   0x85ebca77c2b2ae63, 0x27d4eb2f165667c5};
#define PRIME32 0x9e3779b1

static const unsigned char secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
/* Where in the secret the keys of the last stripe, of scrambling, and of the halves of the result are. */
#define LAST_KEY 121
#define SCRAMBLE_KEY 128
#define LOW_KEY 11
#define HIGH_KEY 117

/* A range: where it is copied to (NULL: nowhere), where it is, its bytes, and where its hash goes. */
typedef struct {
    char *to;
    const char *from;
    size_t nbytes;
    unsigned char *digest;
} Run;

/* A run, and how far it is done. */
typedef struct {
    Run run;
    size_t at;
    __m256i sums[2];
} Lane;

INLINED __m256i load(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

INLINED void add(__m256i *sums, const __m256i *words, const unsigned char *key) {
    for (int half = 0; half < 2; half++) {
        __m256i mixed = _mm256_xor_si256(words[half], load(key + 32 * half));
        __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
        __m256i swapped = _mm256_shuffle_epi32(words[half], 0x4e);
        sums[half] = _mm256_add_epi64(sums[half], _mm256_add_epi64(product, swapped));
    }
}

INLINED void scramble(__m256i *sums) {
    const __m256i prime = _mm256_set1_epi32((int)PRIME32);
    for (int half = 0; half < 2; half++) {
        __m256i mixed = _mm256_xor_si256(sums[half], _mm256_srli_epi64(sums[half], 47));
        mixed = _mm256_xor_si256(mixed, load(secret + SCRAMBLE_KEY + 32 * half));
        __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
        sums[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
    }
}

/* Adds ``stripes`` stripes, and copies them if ``to`` is not NULL; ``stream``: past the cache;
 * ``alone``: see prefetching.h. */
INLINED void add_stripes(__m256i *sums, char *to, const char *from, size_t stripes, int stream,
                         int alone) {
    for (size_t one = 0; one < stripes; one++, from += STRIPE) {
        if (to == NULL || !alone) prefetch_once(from + AHEAD, alone);
        __m256i words[2] = {load(from), load(from + 32)};
        for (int half = 0; half < 2 && to != NULL; half++) {
            __m256i *there = (__m256i *)(to + one * STRIPE) + half;
            if (stream) _mm256_stream_si256(there, words[half]);
            else _mm256_storeu_si256(there, words[half]);
        }
        add(sums, words, secret + 8 * one);
    }
}

INLINED void add_and_copy(__m256i *sums, char *to, const char *from, size_t stripes, int alone) {
    if (to == NULL) add_stripes(sums, NULL, from, stripes, 0, alone);
    else if ((uintptr_t)to % 32 == 0) add_stripes(sums, to, from, stripes, 1, alone);
    else add_stripes(sums, to, from, stripes, 0, alone);
}

INLINED void add_some(__m256i *sums, char *to, const char *from, size_t stripes) {
    if (prefetches_alone()) add_and_copy(sums, to, from, stripes, 1);
    else add_and_copy(sums, to, from, stripes, 0);
}

static uint64_t word(const unsigned char *from) {
    uint64_t found;
    memcpy(&found, from, sizeof found);
    return found;
}

/* Half of the hash, most significant byte first. */
static void half_of(unsigned char *digest, const uint64_t *sums, const unsigned char *key,
                    uint64_t total) {
    for (int pair = 0; pair < 4; pair++) {
        unsigned __int128 product = (unsigned __int128)(sums[2 * pair] ^ word(key + 16 * pair)) *
                                    (sums[2 * pair + 1] ^ word(key + 16 * pair + 8));
        total += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    total = (total ^ (total >> 37)) * 0x165667919e3779f9;
    total = __builtin_bswap64(total ^ (total >> 32));
    memcpy(digest, &total, sizeof total);
}

/* What comes after the last whole block of stripes. */
AVX2 static void finish(Lane *lane) {
    const char *from = lane->run.from + lane->at, *last = lane->run.from + lane->run.nbytes - STRIPE;
    char *to = lane->run.to == NULL ? NULL : lane->run.to + lane->at;
    size_t left = lane->run.nbytes - lane->at, stripes = (left - 1) / STRIPE;
    uint64_t sums[8];
    add_some(lane->sums, to, from, stripes);
    if (to != NULL) memcpy(to + stripes * STRIPE, from + stripes * STRIPE, left - stripes * STRIPE);
    add(lane->sums, (const __m256i[2]){load(last), load(last + 32)}, secret + LAST_KEY);
    memcpy(sums, lane->sums, sizeof sums);
    half_of(lane->run.digest, sums, secret + HIGH_KEY, ~(lane->run.nbytes * primes[1]));
    half_of(lane->run.digest + 8, sums, secret + LOW_KEY, lane->run.nbytes * primes[0]);
}

AVX2 static void hash_all(const Run *runs, Py_ssize_t count) {
    const uint64_t start[8] = {0xc2b2ae3d, primes[0], primes[1], primes[2],
                               primes[3],  0x85ebca77, primes[4], PRIME32};
    Lane lanes[LANES];
    Py_ssize_t next = 0;
    size_t since = 0;
    int busy = 0;
    for (;;) {
        for (; busy < LANES && next < count; busy++, next++)
            lanes[busy] = (Lane){runs[next], 0, {load(start), load(start + 4)}};
        if (busy == 0) break;
        for (int at = 0; at < busy;) {
            Lane *lane = &lanes[at];
            if (lane->run.nbytes - lane->at > STRIPES * STRIPE) {
                char *to = lane->run.to == NULL ? NULL : lane->run.to + lane->at;
                __m256i sums[2] = {lane->sums[0], lane->sums[1]};
                size_t begun = lane->at;
                int left = to == NULL ? TURN : 1;
                do {
                    add_some(sums, to, lane->run.from + lane->at, STRIPES);
                    scramble(sums);
                    lane->at += STRIPES * STRIPE;
                } while (--left > 0 && lane->run.nbytes - lane->at > STRIPES * STRIPE);
                lane->sums[0] = sums[0];
                lane->sums[1] = sums[1];
                at++;
                take_turns_after(lane->at - begun, &since);
            } else {
                finish(lane);
                *lane = lanes[--busy];
            }
        }
    }
    _mm_sfence();
}

/* Fills ``runs`` from tuples of three numbers; 0 with an exception if they are not. */
static int read_runs(PyObject *list, Run *runs, unsigned char *digests) {
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(list); at++) {
        PyObject *run = PyList_GET_ITEM(list, at);
        int64_t numbers[3];
        if (!PyTuple_Check(run) || PyTuple_GET_SIZE(run) != 3) {
            PyErr_SetString(PyExc_TypeError, "a run is a tuple of three numbers");
            return 0;
        }
        for (int i = 0; i < 3; i++) {
            numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(run, i));
            if (numbers[i] == -1 && PyErr_Occurred()) return 0;
        }
        if (numbers[2] < SHORTEST) {
            PyErr_SetString(PyExc_ValueError, "a run has fewer than 241 bytes");
            return 0;
        }
        runs[at] = (Run){(char *)(uintptr_t)numbers[0], (const char *)(uintptr_t)numbers[1],
                         (size_t)numbers[2], digests + DIGEST * at};
    }
    return 1;
}
#endif

/* hash_runs(runs): see _native.pyi. */
PyObject *torchstore_hash_runs(PyObject *self, PyObject *list) {
    (void)self;
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "runs: not a list");
        return NULL;
    }
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        Py_ssize_t count = PyList_GET_SIZE(list);
        PyObject *digests = PyBytes_FromStringAndSize(NULL, DIGEST * count);
        Run *runs = PyMem_New(Run, (size_t)count + 1);
        if (runs == NULL) PyErr_NoMemory();
        if (digests == NULL || runs == NULL ||
            !read_runs(list, runs, (unsigned char *)PyBytes_AS_STRING(digests))) {
            Py_CLEAR(digests);
        } else {
            Py_BEGIN_ALLOW_THREADS
            hash_all(runs, count);
            Py_END_ALLOW_THREADS
        }
        PyMem_Free(runs);
        return digests;
    }
#endif
    Py_RETURN_NONE;
}
