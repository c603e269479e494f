/* Rows of memory through sockets, with the GIL released.
 *
 * Two things make it cheap. Short rows go through a buffer that stays in the cache, since passing
 * each of them to the kernel takes longer than a copy. And while much is still to come, the kernel
 * wakes the receiver only when LOW bytes have arrived (SO_RCVLOWAT), instead of for each packet:
 * otherwise it and the thread take the socket's lock from each other, and together they use a
 * third more time.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

/* As many parts as the kernel takes with one call. */
#define PARTS 1024
/* Rows shorter than this go through the buffer. */
#define SHORT 3072
/* Bytes of the buffer: it fits into the second-level cache beside what the kernel needs. */
#define BUFFER (256 << 10)
/* Bytes that arrive before a receiver is woken. */
#define LOW (256 << 10)
#define LINE 64
#define TOGETHER 8

/* (address, nbytes, rows, stride) */
typedef const int64_t *Grid;

/* Rows of bytes, and how far their transfer has come: the grid, its row, and the byte of that. */
typedef struct {
    const int64_t *grids;
    Py_ssize_t count, grid;
    int64_t row, byte;
} Progress;

/* What one call of the kernel moves. A part with a grid lies in the buffer: whole rows of that grid,
 * from ``row`` on. */
typedef struct {
    struct iovec parts[PARTS];
    struct {
        Grid grid;
        int64_t row;
    } packed[PARTS];
    int count;
    int64_t nbytes;
} Call;

static char *row_of(Grid grid, int64_t row) {
    return (char *)(uintptr_t)grid[0] + row * grid[3];
}

/* Copies rows to the buffer, a cache line of several in turn. Meanwhile it prefetches the rows after
 * them, which the hardware does not do where rows have gaps. */
static void gather(char *to, Grid grid, int64_t row, int64_t rows) {
    size_t n = (size_t)grid[1];
    while (rows >= TOGETHER && n >= 4 * LINE) {
        const char *from = row_of(grid, row);
        ptrdiff_t ahead = row + 2 * TOGETHER <= grid[2] ? TOGETHER * grid[3] : 0;
        size_t at = 0;
        for (; at + LINE <= n; at += LINE) {
            for (int one = 0; one < TOGETHER; one++) {
                const char *line = from + one * grid[3] + at;
                __builtin_prefetch(line + ahead);
                memcpy(to + (size_t)one * n + at, line, LINE);
            }
        }
        for (int one = 0; one < TOGETHER && at < n; one++)
            memcpy(to + (size_t)one * n + at, from + one * grid[3] + at, n - at);
        to += TOGETHER * n; row += TOGETHER; rows -= TOGETHER;
    }
    for (; rows > 0; rows--, row++, to += n) memcpy(to, row_of(grid, row), n);
}

/* Copies one row from the buffer, past the cache: what is received is larger than it. */
static void place(char *to, const char *from, size_t n) {
#if defined(__x86_64__)
    size_t head = (size_t)(-(uintptr_t)to) & (LINE - 1);
    if (n >= head + LINE) {
        memcpy(to, from, head);
        to += head; from += head; n -= head;
        for (; n >= LINE; to += LINE, from += LINE, n -= LINE) {
            for (int at = 0; at < LINE; at += 16) {
                __m128i some = _mm_loadu_si128((const __m128i *)(from + at));
                _mm_stream_si128((__m128i *)(to + at), some);
            }
        }
    }
#endif
    memcpy(to, from, n);
}

/* Copies what has arrived in the buffer, of the first ``nbytes`` bytes of a call, to its rows. */
static void scatter(const Call *call, int64_t nbytes) {
    for (int part = 0; part < call->count && nbytes > 0; part++) {
        int64_t here = (int64_t)call->parts[part].iov_len;
        if (here > nbytes) here = nbytes;
        nbytes -= here;
        Grid grid = call->packed[part].grid;
        if (grid == NULL) continue;
        const char *from = call->parts[part].iov_base;
        for (int64_t row = call->packed[part].row; here > 0; row++, from += grid[1], here -= grid[1])
            place(row_of(grid, row), from, (size_t)(here < grid[1] ? here : grid[1]));
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

static int is_short(Grid grid) { return grid[2] > 1 && grid[1] < SHORT; }

/* Collects at most ``most`` of the bytes that come next. */
static void collect(Progress at, Call *call, char *buffer, int64_t most, int sending) {
    int64_t room = BUFFER;
    call->count = 0;
    call->nbytes = 0;
    while (at.grid < at.count && call->count < PARTS && call->nbytes < most) {
        Grid grid = at.grids + 4 * at.grid;
        int64_t n = grid[1], left = most - call->nbytes, rows = 1;
        if (at.row >= grid[2] || n <= 0) {
            at.grid++;
            at.row = at.byte = 0;
            continue;
        }
        struct iovec *part = &call->parts[call->count];
        call->packed[call->count].grid = NULL;
        part->iov_base = row_of(grid, at.row) + at.byte;
        part->iov_len = (size_t)(n - at.byte < left ? n - at.byte : left);
        if (is_short(grid) && at.byte == 0 && n <= left) {
            rows = (room < left ? room : left) / n;
            if (rows == 0) break;
            if (rows > grid[2] - at.row) rows = grid[2] - at.row;
            part->iov_base = buffer + (BUFFER - room);
            part->iov_len = (size_t)(rows * n);
            call->packed[call->count].grid = grid;
            call->packed[call->count].row = at.row;
            if (sending) gather(part->iov_base, grid, at.row, rows);
            room -= rows * n;
        }
        call->nbytes += (int64_t)part->iov_len;
        call->count++;
        at.row += rows;
        at.byte = 0;
    }
}

static void advance(Progress *at, int64_t bytes) {
    while (bytes > 0) {
        Grid grid = at->grids + 4 * at->grid;
        int64_t n = grid[1];
        if (at->row >= grid[2] || n <= 0) {
            at->grid++;
            at->row = at->byte = 0;
        } else if (bytes < n - at->byte) {
            at->byte += bytes;
            bytes = 0;
        } else {
            bytes -= n - at->byte;
            at->row++;
            at->byte = 0;
            int64_t whole = bytes / n < grid[2] - at->row ? bytes / n : grid[2] - at->row;
            at->row += whole;
            bytes -= whole * n;
        }
    }
}

static int wake_at(int fd, int nbytes) {
    return setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &nbytes, sizeof nbytes) == 0;
}

/* Moves everything, or as much as is possible; returns the error, or 0. */
static int move_all(int fd, Progress at, int64_t left, char *buffer, int sending, int more,
                    int64_t *total) {
    Call call;
    struct msghdr message = {0};
    int failed = 0, low = 0;
    message.msg_iov = call.parts;
    while (left > 0) {
        int64_t most = left;
        if (!sending && left >= 2 * LOW) {
            if (!low) low = wake_at(fd, LOW);
            /* At every wait, LOW bytes are still to come, so the thread is certain to be woken. */
            most = left - LOW;
        } else if (low) {
            low = !wake_at(fd, 1);
        }
        collect(at, &call, buffer, most, sending);
        message.msg_iovlen = (size_t)call.count;
        int flags = MSG_NOSIGNAL | (more || call.nbytes < left ? MSG_MORE : 0);
        ssize_t moved = sending ? sendmsg(fd, &message, flags) : recvmsg(fd, &message, MSG_WAITALL);
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) failed = errno;
        if (moved <= 0) break;
        if (!sending) scatter(&call, moved);
        advance(&at, moved);
        left -= moved;
        *total += moved;
    }
    if (low) wake_at(fd, 1);
    return failed;
}

/* Where short rows are gathered. It stays, because a server returns large blocks to the system when
   they are freed, and would get new pages for each transfer. */
static _Thread_local char packed[BUFFER];

/* transfer(fd, rows, sending, more): see _native.pyi. */
PyObject *torchstore_transfer(PyObject *self, PyObject *args) {
    Py_buffer view;
    int fd, sending, more, failed;
    (void)self;
    if (!PyArg_ParseTuple(args, "iy*pp", &fd, &view, &sending, &more)) return NULL;
    if (view.len % (4 * (Py_ssize_t)sizeof(int64_t)) != 0) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "rows: length is not a multiple of 32 bytes");
        return NULL;
    }
    Progress at = {view.buf, view.len / (Py_ssize_t)(4 * sizeof(int64_t)), 0, 0, 0};
    int64_t left = 0, total = 0;
    int packs = 0;
    for (Py_ssize_t one = 0; one < at.count; one++) {
        Grid grid = at.grids + 4 * one;
        if (grid[1] <= 0 || grid[2] <= 0) continue;
        left += grid[1] * grid[2];
        packs = packs || is_short(grid);
    }
    Py_BEGIN_ALLOW_THREADS
    failed = move_all(fd, at, left, packs ? packed : NULL, sending, more, &total);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    if (failed) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromLongLong(total);
}
