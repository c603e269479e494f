/* Streaming copies for tensors, with the GIL released.
 *
 * Why: glibc's memcpy goes around the cache (non-temporal stores) only above a threshold that is a
 * share of the last-level cache; on servers with hundreds of MB of it, tensors of a few MB are
 * copied through the cache, which reads every destination line before overwriting it: half the
 * memory's speed. A weight set is larger than any cache, so it is streamed whatever its pieces.
 *
 * Four pages are interleaved so that four DRAM rows and TLB entries are in flight.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define STREAM_MIN 16384

static void copy_stream(char *dst, const char *src, size_t n) {
#if defined(__x86_64__)
    if (n >= STREAM_MIN) {
        size_t head = (size_t)(-(uintptr_t)dst) & 63;
        memcpy(dst, src, head);
        dst += head; src += head; n -= head;
        while (n >= 4 * 4096) {
            for (size_t at = 0; at < 4096; at += 64) {
                for (size_t page = 0; page < 4; page++) {
                    const char *from = src + page * 4096 + at;
                    char *to = dst + page * 4096 + at;
                    _mm_prefetch(from + 256, _MM_HINT_T0);
                    __m128i a = _mm_loadu_si128((const __m128i *)from);
                    __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
                    __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
                    __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
                    _mm_stream_si128((__m128i *)to, a);
                    _mm_stream_si128((__m128i *)(to + 16), b);
                    _mm_stream_si128((__m128i *)(to + 32), c);
                    _mm_stream_si128((__m128i *)(to + 48), d);
                }
            }
            src += 4 * 4096; dst += 4 * 4096; n -= 4 * 4096;
        }
        _mm_sfence();
    }
#endif
    memcpy(dst, src, n);
}

/* copy_many(triples, stream): triples is a C-contiguous buffer of int64 (dst, src, nbytes). */
static PyObject *copy_many(PyObject *self, PyObject *args) {
    Py_buffer view;
    int stream;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*p", &view, &stream)) return NULL;
    if (view.len % (3 * (Py_ssize_t)sizeof(int64_t)) != 0) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "triples: length is not a multiple of 24 bytes");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    const int64_t *triple = (const int64_t *)view.buf;
    for (Py_ssize_t i = view.len / (Py_ssize_t)(3 * sizeof(int64_t)); i > 0; i--, triple += 3) {
        char *dst = (char *)(uintptr_t)triple[0];
        const char *src = (const char *)(uintptr_t)triple[1];
        size_t n = (size_t)triple[2];
        if (stream) copy_stream(dst, src, n);
        else memcpy(dst, src, n);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

#if defined(__x86_64__)
#define TOGETHER 8

/* Up to TOGETHER rows, a cache line of each in turn, while the same line of as many further rows is
 * fetched (each row begins a new page, so the hardware does not). Rows may be aligned differently:
 * what is beside the whole lines of each is copied in the ordinary way. */
static void stream_rows(char *dst, const char *src, size_t n, int rows, ptrdiff_t dst_step,
                        ptrdiff_t src_step) {
    char *to[TOGETHER];
    const char *from[TOGETHER];
    size_t lines = n;
    for (int row = 0; row < rows; row++) {
        char *start = dst + row * dst_step;
        size_t head = (size_t)(-(uintptr_t)start) & 63;
        memcpy(start, src + row * src_step, head);
        to[row] = start + head;
        from[row] = src + row * src_step + head;
        if (((n - head) & ~(size_t)63) < lines) lines = (n - head) & ~(size_t)63;
    }
    for (size_t at = 0; at < lines; at += 64) {
        for (int row = 0; row < rows; row++) {
            const char *of = from[row] + at;
            char *at_line = to[row] + at;
            _mm_prefetch(of + rows * src_step, _MM_HINT_T0);
            __m128i a = _mm_loadu_si128((const __m128i *)of);
            __m128i b = _mm_loadu_si128((const __m128i *)(of + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(of + 32));
            __m128i d = _mm_loadu_si128((const __m128i *)(of + 48));
            _mm_stream_si128((__m128i *)at_line, a);
            _mm_stream_si128((__m128i *)(at_line + 16), b);
            _mm_stream_si128((__m128i *)(at_line + 32), c);
            _mm_stream_si128((__m128i *)(at_line + 48), d);
        }
    }
    for (int row = 0; row < rows; row++) {
        size_t done = (size_t)(to[row] - (dst + row * dst_step)) + lines;
        memcpy(to[row] + lines, from[row] + lines, n - done);
    }
}
#endif

static void copy_grid(char *dst, const char *src, size_t n, size_t rows,
                      ptrdiff_t dst_step, ptrdiff_t src_step, int stream) {
#if defined(__x86_64__)
    if (stream && n >= 256) {
        while (rows > 0) {
            int some = rows < TOGETHER ? (int)rows : TOGETHER;
            stream_rows(dst, src, n, some, dst_step, src_step);
            dst += some * dst_step; src += some * src_step; rows -= (size_t)some;
        }
        _mm_sfence();
        return;
    }
#endif
    for (; rows > 0; rows--, dst += dst_step, src += src_step) memcpy(dst, src, n);
}

/* copy_rows(grids, stream): an int64 buffer of (dst, src, nbytes, rows, dst step, src step). */
static PyObject *copy_rows(PyObject *self, PyObject *args) {
    Py_buffer view;
    int stream;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*p", &view, &stream)) return NULL;
    if (view.len % (6 * (Py_ssize_t)sizeof(int64_t)) != 0) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "grids: length is not a multiple of 48 bytes");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    const int64_t *grid = (const int64_t *)view.buf;
    for (Py_ssize_t i = view.len / (Py_ssize_t)(6 * sizeof(int64_t)); i > 0; i--, grid += 6)
        copy_grid((char *)(uintptr_t)grid[0], (const char *)(uintptr_t)grid[1], (size_t)grid[2],
                  (size_t)grid[3], (ptrdiff_t)grid[4], (ptrdiff_t)grid[5], stream);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy_many", copy_many, METH_VARARGS,
     "copy_many(triples, stream)\n\nCopy each (dst, src, nbytes) of an int64 buffer, GIL released."},
    {"copy_rows", copy_rows, METH_VARARGS,
     "copy_rows(grids, stream)\n\nCopy each (dst, src, nbytes, rows, dst step, src step) of an int64\n"
     "buffer, row by row, GIL released."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "torchstore_core._native",
                                    "Streaming copies.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
