/* A disk that fails: preloaded into a process, it counts the changes below one folder and lets some of them fail.
 *
 * Every open for writing, write, fsync, rename, mkdir, unlink and rmdir below FAULTY_DISK_FOLDER is an operation; for
 * the kinds `unreadable` and `stale`, every read of a regular file instead. From operation FAULTY_DISK_AT on (1 is the first), FAULTY_DISK_KIND happens:
 *   none      nothing; operations are only counted
 *   glitch    one operation fails with EIO, the later ones succeed
 *   dead      every operation fails with EIO
 *   full      whatever needs room fails with ENOSPC
 *   quota     whatever needs room fails with EDQUOT
 *   readonly  every operation fails with EROFS
 *   fsync     one fsync fails with EIO
 *   unreadable  every read fails with EIO
 *   stale     one read fails with ESTALE, as on NFS where another node has replaced the file
 *   kill      the process is killed instead of doing the operation
 * Whatever the kind, FAULTY_DISK_FLOCK is the errno of every flock below the folder; 0 grants it to everybody, as where
 * hosts do not see each other's.
 * Operations are counted over all processes, in the file FAULTY_DISK_COUNT; FAULTY_DISK_LOG gets a line for each that
 * fails, or for every one where nothing fails: its number, its name, its path.
 *
 * A process that has called record_disk(FOLDER, LOG), or was started with these in RECORD_DISK_FOLDER and RECORD_DISK_LOG,
 * notes instead all that it does to names and bytes below the folder, in order, each after it was done; no other process
 * that records into the same log does anything there in between. What a thread told record_site is noted with its fsyncs.
 * recorded_steps.py reads the log, and crash_states.py says what may be left of that when the power goes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NEEDS_ROOM = 1, SYNCS = 2, READS = 4 };

struct count {
    long operations;
    int is_over;
};

static struct count *count;
static const char *folder, *kind, *log_path;
static long at;

void record_disk(const char *below, const char *log);

__attribute__((constructor)) static void prepare(void) {
    if (getenv("RECORD_DISK_FOLDER") && getenv("RECORD_DISK_LOG"))
        record_disk(getenv("RECORD_DISK_FOLDER"), getenv("RECORD_DISK_LOG"));
    const char *path = getenv("FAULTY_DISK_COUNT");
    folder = getenv("FAULTY_DISK_FOLDER");
    kind = getenv("FAULTY_DISK_KIND");
    log_path = getenv("FAULTY_DISK_LOG");
    if (!path || !folder || !kind || !log_path || !getenv("FAULTY_DISK_AT"))
        return;
    at = atol(getenv("FAULTY_DISK_AT"));
    int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof *count))
        abort();
    count = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (count == MAP_FAILED)
        abort();
    close(file);
}

static void note(long number, const char *name, const char *path) {
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%ld %s %s\n", number, name, path);
    int file = (int)syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0 || syscall(SYS_write, file, line, length) != length)
        abort();
    syscall(SYS_close, file);
}

static int fails_reads(void) { return !strcmp(kind, "unreadable") || !strcmp(kind, "stale"); }

/* The error of an operation on an absolute path, or 0. */
static int fault(const char *name, const char *path, int traits) {
    if (!count || strncmp(path, folder, strlen(folder)))
        return 0;
    if (!!(traits & READS) != fails_reads())
        return 0;
    long number = __atomic_add_fetch(&count->operations, 1, __ATOMIC_SEQ_CST);
    if (!strcmp(kind, "none"))
        note(number, name, path);
    if (number < at || !strcmp(kind, "none"))
        return 0;
    int once = !strcmp(kind, "glitch") || !strcmp(kind, "fsync") || !strcmp(kind, "kill")
        || !strcmp(kind, "stale");
    if (!strcmp(kind, "fsync") && !(traits & SYNCS))
        return 0;
    if ((!strcmp(kind, "full") || !strcmp(kind, "quota")) && !(traits & NEEDS_ROOM))
        return 0;
    if (once && __atomic_exchange_n(&count->is_over, 1, __ATOMIC_SEQ_CST))
        return 0;
    note(number, name, path);
    if (!strcmp(kind, "kill"))
        kill(getpid(), SIGKILL);
    return !strcmp(kind, "full") ? ENOSPC : !strcmp(kind, "quota") ? EDQUOT : !strcmp(kind, "readonly") ? EROFS
        : !strcmp(kind, "stale") ? ESTALE : EIO;
}

/* The absolute path of a name in an open folder; 0 where it has none. */
static int absolute(int directory, const char *path, char *whole) {
    char link[64];
    if (path[0] == '/')
        return snprintf(whole, PATH_MAX, "%s", path) < PATH_MAX;
    snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, whole, PATH_MAX);
    return length > 0 && snprintf(whole + length, PATH_MAX - length, "/%s", path) < PATH_MAX - length;
}

static const char *recorded_folder;
static int record = -1;
static pthread_mutex_t recording = PTHREAD_MUTEX_INITIALIZER;
static __thread char site[512];

/* One thread of one process at a time: threads by the mutex, processes by a lock of the log. */
static void lock_record(int kind) {
    struct flock whole = {.l_type = kind, .l_whence = SEEK_SET};
    if (kind == F_WRLCK)
        pthread_mutex_lock(&recording);
    while (fcntl(record, F_SETLKW, &whole))
        if (errno != EINTR)
            abort();
    if (kind == F_UNLCK)
        pthread_mutex_unlock(&recording);
}

/* Called by a thread: the place in the program from which it is about to sync. */
void record_site(const char *name) {
    snprintf(site, sizeof site, "%s", name);
}

/* A child by fork has one thread, which does not hold the mutex. */
static void begin_child(void) {
    pthread_mutex_init(&recording, NULL);
}

/* The folder itself, or a path below it. */
static int is_recorded(const char *path) {
    size_t length = strlen(recorded_folder);
    return !strncmp(path, recorded_folder, length) && (path[length] == '/' || !path[length]);
}

/* Called by a process that is to be recorded from then on. */
void record_disk(const char *below, const char *log) {
    recorded_folder = strdup(below);
    record = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (record < 0 || pthread_atfork(NULL, NULL, begin_child))
        abort();
}

/* One line, and the bytes behind it: name, path, other path, offset, number of bytes, process, site. */
static void note_change(const char *name, const char *path, const char *other, off64_t offset, const void *data, size_t size) {
    char line[2 * PATH_MAX + 1024];
    if (!is_recorded(path))
        return;
    int length = snprintf(line, sizeof line, "%s\t%s\t%s\t%lld\t%zu\t%d\t%s\n", name, path, other, (long long)offset, size,
                          getpid(), strcmp(name, "fsync") ? "" : site);
    struct iovec parts[] = {{line, length}, {(void *)data, size}};
    if (syscall(SYS_writev, record, parts, 2) != (ssize_t)(length + size))
        abort();
}

/* A name in a folder that is recorded. */
static int concerns(int directory, const char *path) {
    char whole[PATH_MAX];
    return absolute(directory, path, whole) && is_recorded(whole);
}

static void note_name(const char *name, int directory, const char *path, const char *other) {
    char whole[PATH_MAX];
    if (absolute(directory, path, whole))
        note_change(name, whole, other, 0, "", 0);
}

static void note_names(const char *name, int from, const char *old, int to, const char *new) {
    char whole[PATH_MAX];
    if (absolute(to, new, whole))
        note_name(name, from, old, whole);
}

/* The path of an open file that still has a name below the folder. */
static int path_of(int file, char *path) {
    char link[64];
    struct stat status;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0 && is_recorded(path) && !fstat(file, &status)
        && status.st_nlink && (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode));
}

static int concerns_file(int file) {
    char path[PATH_MAX];
    return path_of(file, path);
}

/* All bytes of an open file: some were written in ways that are not seen here, as by stdio. */
static void note_content(int file) {
    char path[PATH_MAX];
    struct stat status;
    if (!path_of(file, path) || fstat(file, &status) || !S_ISREG(status.st_mode))
        return;
    int again = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    char *data = malloc(status.st_size + 1);
    if (again < 0 || !data || syscall(SYS_pread64, again, data, status.st_size, 0) != status.st_size)
        abort();
    note_change("content", path, "", 0, data, status.st_size);
    free(data);
    syscall(SYS_close, again);
}

static void note_written(int file, const void *data, ssize_t size, off64_t offset) {
    char path[PATH_MAX];
    if (size > 0 && path_of(file, path))
        note_change("write", path, "", offset < 0 ? lseek64(file, 0, SEEK_CUR) - size : offset, data, size);
}

static void note_sync(int file) {
    char path[PATH_MAX];
    note_content(file);
    if (path_of(file, path))
        note_change("fsync", path, "", 0, "", 0);
}

static int fault_at(const char *name, int directory, const char *path, int traits) {
    char whole[PATH_MAX];
    return count && absolute(directory, path, whole) ? fault(name, whole, traits) : 0;
}

static int fault_of(const char *name, int file, int traits) {
    char path[PATH_MAX], link[64];
    if (!count)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return fault(name, path, traits);
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)
/* The result of a call, and a note of it where it has succeeded, if it concerns the folder: what blocks, as a pipe does,
 * does not. Such calls of all threads and processes come one after the other. */
#define NOTED(concerns, type, call, note) do { \
    if (record < 0 || !(concerns)) return call; \
    lock_record(F_WRLCK); \
    type done = call; \
    int saved = errno; \
    if (done != -1) { note; } \
    lock_record(F_UNLCK); \
    errno = saved; \
    return done; } while (0)
#define FAIL(found) do { int error = (found); if (error) { errno = error; return -1; } } while (0)

static int open_any(int directory, const char *path, int flags, mode_t mode) {
    if (flags & (O_WRONLY | O_RDWR | O_CREAT))
        FAIL(fault_at("open", directory, path, flags & O_CREAT ? NEEDS_ROOM : 0));
    int is_new = 0;
    if (record < 0 || !(flags & (O_CREAT | O_TRUNC)) || !concerns(directory, path))
        return (int)syscall(SYS_openat, directory, path, flags, mode);
    NOTED(1, int, (is_new = faccessat(directory, path, F_OK, AT_SYMLINK_NOFOLLOW), (int)syscall(SYS_openat, directory, path, flags, mode)),
          if (is_new) note_name("create", directory, path, ""); else if (flags & O_TRUNC) note_content(done));
}

#define MODE mode_t mode = 0; if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) { \
    va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE return open_any(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return open_any(AT_FDCWD, path, flags, mode); }
int openat(int directory, const char *path, int flags, ...) { MODE return open_any(directory, path, flags, mode); }
int openat64(int directory, const char *path, int flags, ...) { MODE return open_any(directory, path, flags, mode); }

ssize_t read(int file, void *data, size_t size) {
    struct stat status;
    if (count && fails_reads() && !fstat(file, &status) && S_ISREG(status.st_mode))
        FAIL(fault_of("read", file, READS));
    REAL(ssize_t, "read", int, void *, size_t);
    return real(file, data, size);
}

ssize_t write(int file, const void *data, size_t size) {
    FAIL(fault_of("write", file, NEEDS_ROOM));
    REAL(ssize_t, "write", int, const void *, size_t);
    NOTED(concerns_file(file), ssize_t, real(file, data, size), note_written(file, data, done, -1));
}

ssize_t writev(int file, const struct iovec *parts, int number) {
    FAIL(fault_of("write", file, NEEDS_ROOM));
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    NOTED(concerns_file(file), ssize_t, real(file, parts, number), note_content(file));
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
    FAIL(fault_of("write", file, NEEDS_ROOM));
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    NOTED(concerns_file(file), ssize_t, real(file, data, size, offset), note_written(file, data, done, offset));
}

int flock(int file, int operation) {
    const char *answer = getenv("FAULTY_DISK_FLOCK");
    char path[PATH_MAX], link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (answer && folder && length > 0 && !strncmp(path, folder, strlen(folder))) {
        errno = atoi(answer);
        return errno ? -1 : 0;
    }
    REAL(int, "flock", int, int);
    return real(file, operation);
}

int fsync(int file) {
    FAIL(fault_of("fsync", file, SYNCS));
    REAL(int, "fsync", int);
    NOTED(concerns_file(file), int, real(file), note_sync(file));
}

int fdatasync(int file) {
    FAIL(fault_of("fsync", file, SYNCS));
    REAL(int, "fdatasync", int);
    NOTED(concerns_file(file), int, real(file), note_sync(file));
}

int rename(const char *from, const char *to) {
    FAIL(fault_at("rename", AT_FDCWD, to, 0));
    REAL(int, "rename", const char *, const char *);
    NOTED(concerns(AT_FDCWD, from), int, real(from, to), note_names("rename", AT_FDCWD, from, AT_FDCWD, to));
}

int mkdir(const char *path, mode_t mode) {
    struct stat status;
    /* A folder that is there already is no change, and no disk is asked. */
    if (stat(path, &status))
        FAIL(fault_at("mkdir", AT_FDCWD, path, NEEDS_ROOM));
    REAL(int, "mkdir", const char *, mode_t);
    NOTED(concerns(AT_FDCWD, path), int, real(path, mode), note_name("mkdir", AT_FDCWD, path, ""));
}

int unlink(const char *path) {
    FAIL(fault_at("unlink", AT_FDCWD, path, 0));
    REAL(int, "unlink", const char *);
    NOTED(concerns(AT_FDCWD, path), int, real(path), note_name("unlink", AT_FDCWD, path, ""));
}

int unlinkat(int directory, const char *path, int flags) {
    FAIL(fault_at(flags & AT_REMOVEDIR ? "rmdir" : "unlink", directory, path, 0));
    REAL(int, "unlinkat", int, const char *, int);
    NOTED(concerns(directory, path), int, real(directory, path, flags), note_name("unlink", directory, path, ""));
}

int rmdir(const char *path) {
    FAIL(fault_at("rmdir", AT_FDCWD, path, 0));
    REAL(int, "rmdir", const char *);
    NOTED(concerns(AT_FDCWD, path), int, real(path), note_name("unlink", AT_FDCWD, path, ""));
}

/* What follows never fails: it is noted only. */

int close(int file) {
    int is_written = record >= 0 && file != record && (fcntl(file, F_GETFL) & O_ACCMODE) != O_RDONLY;
    if (is_written && concerns_file(file)) {
        lock_record(F_WRLCK);
        note_content(file);
        lock_record(F_UNLCK);
    }
    return (int)syscall(SYS_close, file);
}

int ftruncate64(int file, off64_t size) {
    REAL(int, "ftruncate64", int, off64_t);
    NOTED(concerns_file(file), int, real(file, size), note_content(file));
}

int link(const char *from, const char *to) {
    REAL(int, "link", const char *, const char *);
    NOTED(concerns(AT_FDCWD, from), int, real(from, to), note_names("link", AT_FDCWD, from, AT_FDCWD, to));
}
