/* A shared disk that other nodes see late: preloaded into processes, each of which belongs to a node.
 *
 * A process gets its node from become_node(), or when it starts from the environment (SHARED_DISK_*, see prepare). What
 * is below the folder is the server's: every change takes place at once, and one node after the other comes to see it.
 * Until a change of another node is seen, here
 *   a new name, and all that is below it, is not there (ENOENT), and not in listings;
 *   a replaced file has the bytes that it had, a removed one is still there, a renamed folder has its old name;
 *   what was appended is not there yet: the file ends where it ended.
 * Of these, only the `kinds` given are late; or listings of folders alone, while names that are asked for are known.
 * That takes a quarter, half or all of the seconds given, by node and folder, so that folders disagree. Own changes are
 * seen at once. Whether a name may be made is the server's decision: an exclusive open, a link, mkdir and rename find
 * what is there, and the node sees the name from then on. What is opened, made or removed in a folder is so in the
 * folder that the node has in mind, wherever that was moved to; in one that is removed nothing can be made (ESTALE).
 *
 * This is NFS with attribute caches (names by lookupcache=all: acregmin is 3 s, acdirmin 30 s) and, for contents, nocto:
 * an open does not ask the server, so it is worse than NFS's defaults. Lustre, GPFS and CephFS are coherent. Not
 * modelled: late permissions and times, files cut off in place, mmap, sendfile, a name that comes and goes.
 *
 * With `stale`, names that another node has replaced or removed answer ESTALE until that is seen, and so do reads of
 * files that were opened before. With `silly`, a file that a process of the same node has open is not removed but
 * called .nfsN until it is closed, as NFS does it: rmdir of its folder fails (ENOTEMPTY), unlink of that name too (EBUSY).
 * From operation `quota` on, whatever needs room fails (EDQUOT): write, mkdir, rename, link and opens that make a file.
 * flock is the machine's (-1), holds on one node only (0), or fails with this errno.
 */
#include "shared_disk.h"

static int open_any(int directory, const char *path, int flags, mode_t mode) {
    char whole[LENGTH], found[LENGTH];
    struct stat status;
    if (!strcmp(path, "/proc/sys/kernel/random/boot_id") && table) {
        int file = memfd_create("boot_id", 0);
        if (dprintf(file, "node%d\n", node) < 0 || lseek(file, 0, SEEK_SET))
            abort();
        return file;
    }
    if (!is_shared(directory, path, whole))
        return (int)syscall(SYS_openat, directory, path, flags, mode);
    lock();
    if (!(flags & O_CREAT)) {
        if (!see(whole, found))
            return unlock(-1);
        if (flags & (O_WRONLY | O_RDWR) && is_at_or_below(found, asides)) {
            errno = ESTALE;
            return unlock(-1);
        }
        return unlock((int)syscall(SYS_openat, AT_FDCWD, found, flags, mode));
    }
    if (!place(whole, found))
        return unlock(-1);
    if (is_over_quota()) {
        errno = EDQUOT;
        return unlock(-1);
    }
    int was_there = exists(found, &status);
    int file = (int)syscall(SYS_openat, AT_FDCWD, found, flags, mode);
    if (file >= 0 || errno == EEXIST) {
        int saved = errno;
        note(was_there ? SEEN : CREATED, found, "", 0, 0, 0);
        errno = saved;
    }
    return unlock(file);
}

#define MODE mode_t mode = 0; if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) { \
    va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE return open_any(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return open_any(AT_FDCWD, path, flags, mode); }
int openat(int directory, const char *path, int flags, ...) { MODE return open_any(directory, path, flags, mode); }
int openat64(int directory, const char *path, int flags, ...) { MODE return open_any(directory, path, flags, mode); }

/* How much of an open file this node sees; -1 where a read answers ESTALE. */
static long long seen_size(const struct stat *status) {
    long long size = status->st_size;
    for (long number = oldest(); number < table->end; number++) {
        const struct event *event = &table->events[number % EVENTS];
        if (event->file != status->st_ino || event->node == node)
            continue;
        if (event->kind != APPENDED && stale)
            return -1;
        if (event->kind == APPENDED && is_late(event, kinds) && event->size < size)
            size = event->size;
    }
    return size;
}

static ssize_t read_any(int file, void *data, size_t size, off64_t offset) {
    char path[LENGTH];
    struct stat status;
    if (path_of(file, path) && !fstat(file, &status) && S_ISREG(status.st_mode)) {
        off64_t from = offset < 0 ? lseek64(file, 0, SEEK_CUR) : offset;
        lock();
        long long end = seen_size(&status);
        unlock(0);
        if (end < 0)
            FAIL(ESTALE);
        if (from >= end)
            return 0;
        size = size < (size_t)(end - from) ? size : (size_t)(end - from);
    }
    return offset < 0 ? syscall(SYS_read, file, data, size) : syscall(SYS_pread64, file, data, size, offset);
}

ssize_t read(int file, void *data, size_t size) { return read_any(file, data, size, -1); }
ssize_t pread64(int file, void *data, size_t size, off64_t offset) { return read_any(file, data, size, offset); }

ssize_t write(int file, const void *data, size_t size) {
    char path[LENGTH];
    struct stat status;
    int is_ours = path_of(file, path);
    if (is_ours && is_over_quota())
        FAIL(EDQUOT);
    if (!is_ours || !(fcntl(file, F_GETFL) & O_APPEND))
        return syscall(SYS_write, file, data, size);
    lock();
    syscall(SYS_fstat, file, &status);
    ssize_t done = syscall(SYS_write, file, data, size);
    if (done > 0)
        note(APPENDED, path, "", 0, status.st_ino, status.st_size);
    return unlock((int)done);
}

static int stat_any(int directory, const char *path, struct stat *status, int flags) {
    char whole[LENGTH], found[LENGTH];
    if (flags & AT_EMPTY_PATH || !is_shared(directory, path, whole))
        return (int)syscall(SYS_newfstatat, directory, path, status, flags);
    lock();
    if (!see(whole, found))
        return unlock(-1);
    int result = (int)syscall(SYS_newfstatat, AT_FDCWD, found, status, flags);
    if (!result && S_ISREG(status->st_mode)) {
        long long size = seen_size(status);
        status->st_size = size < 0 ? status->st_size : size;
    }
    return unlock(result);
}

int stat64(const char *path, struct stat64 *status) { return stat_any(AT_FDCWD, path, (struct stat *)status, 0); }
int stat(const char *path, struct stat *status) { return stat_any(AT_FDCWD, path, status, 0); }
int lstat64(const char *path, struct stat64 *status) {
    return stat_any(AT_FDCWD, path, (struct stat *)status, AT_SYMLINK_NOFOLLOW);
}
int fstatat64(int directory, const char *path, struct stat64 *status, int flags) {
    return stat_any(directory, path, (struct stat *)status, flags);
}
int fstat64(int file, struct stat64 *status) {
    char path[LENGTH];
    int result = (int)syscall(SYS_fstat, file, status);
    if (!result && S_ISREG(status->st_mode) && path_of(file, path)) {
        lock();
        long long size = seen_size((struct stat *)status);
        unlock(0);
        status->st_size = size < 0 ? status->st_size : size;
    }
    return result;
}

/* Does what takes a path that is there, at the place where this node sees it. */
#define AT_SEEN(directory, path, otherwise, call) do { \
    char whole[LENGTH], found[LENGTH]; \
    if (!is_shared(directory, path, whole)) return otherwise; \
    lock(); \
    if (!see(whole, found)) return unlock(-1); \
    return unlock((int)(call)); } while (0)

int access(const char *path, int mode) {
    AT_SEEN(AT_FDCWD, path, (int)syscall(SYS_faccessat, AT_FDCWD, path, mode), syscall(SYS_faccessat, AT_FDCWD, found, mode));
}
int chmod(const char *path, mode_t mode) {
    AT_SEEN(AT_FDCWD, path, (int)syscall(SYS_fchmodat, AT_FDCWD, path, mode), syscall(SYS_fchmodat, AT_FDCWD, found, mode));
}
int utimensat(int directory, const char *path, const struct timespec times[2], int flags) {
    AT_SEEN(directory, path, (int)syscall(SYS_utimensat, directory, path, times, flags),
            syscall(SYS_utimensat, AT_FDCWD, found, times, flags));
}

int mkdir(const char *path, mode_t mode) {
    char whole[LENGTH], found[LENGTH];
    if (!is_shared(AT_FDCWD, path, whole))
        return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
    if (is_over_quota())
        FAIL(EDQUOT);
    lock();
    if (!place(whole, found))
        return unlock(-1);
    int result = (int)syscall(SYS_mkdirat, AT_FDCWD, found, mode), saved = errno;
    if (!result || saved == EEXIST)
        note(result ? SEEN : CREATED, found, "", 0, 0, 0);
    errno = saved;
    return unlock(result);
}

int link(const char *from, const char *to) {
    char whole[LENGTH], source[LENGTH], found[LENGTH];
    if (!is_shared(AT_FDCWD, to, whole))
        return (int)syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (is_over_quota())
        FAIL(EDQUOT);
    lock();
    if (!place(whole, found))
        return unlock(-1);
    if (is_shared(AT_FDCWD, from, whole)) {
        if (!see(whole, source))
            return unlock(-1);
        from = source;
    }
    int result = (int)syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, found, 0), saved = errno;
    if (!result || saved == EEXIST)
        note(result ? SEEN : CREATED, found, "", 0, 0, 0);
    errno = saved;
    return unlock(result);
}

int rename(const char *from, const char *to) {
    char old[LENGTH], new[LENGTH], source[LENGTH], goal[LENGTH];
    struct stat status;
    if (!is_shared(AT_FDCWD, from, old) || !is_shared(AT_FDCWD, to, new))
        return (int)syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to);
    if (is_over_quota())
        FAIL(EDQUOT);
    lock();
    remove_closed();
    if (look(old, source) == ABSENT) {
        errno = ENOENT;
        return unlock(-1);
    }
    if (!place(old, source) || !place(new, goal))
        return unlock(-1);
    long aside = 0;
    ino_t replaced = 0;
    if (exists(goal, &status) && S_ISREG(status.st_mode) && strcmp(source, goal) && !hide(goal, &status))
        aside = keep(goal, &status), replaced = status.st_nlink > 1 ? 0 : status.st_ino;
    int result = (int)syscall(SYS_renameat, AT_FDCWD, source, AT_FDCWD, goal);
    if (!result)
        note(RENAMED, source, goal, aside, replaced, 0);
    return unlock(result);
}

static int remove_any(int directory, const char *path, int flags) {
    char whole[LENGTH], found[LENGTH];
    struct stat status;
    if (!is_shared(directory, path, whole))
        return (int)syscall(SYS_unlinkat, directory, path, flags);
    lock();
    remove_closed();
    if (look(whole, found) == ABSENT) {
        errno = ENOENT;
        return unlock(-1);
    }
    if (!place(whole, found))
        return unlock(-1);
    long aside = 0;
    status.st_ino = 0;
    if (exists(found, &status) && !(flags & AT_REMOVEDIR)) {
        const char *name = strrchr(found, '/') + 1;
        if (silly && !strncmp(name, ".nfs", 4)) {
            errno = EBUSY;
            return unlock(-1);
        }
        if (hide(found, &status))
            return unlock(0);
    }
    if (status.st_ino)
        aside = keep(found, &status);
    int result = (int)syscall(SYS_unlinkat, AT_FDCWD, found, flags);
    if (!result)
        /* A file that has another name is still there. */
        note(REMOVED, found, "", aside, status.st_nlink > 1 ? 0 : status.st_ino, 0);
    return unlock(result);
}

int unlink(const char *path) { return remove_any(AT_FDCWD, path, 0); }
int unlinkat(int directory, const char *path, int flags) { return remove_any(directory, path, flags); }
int rmdir(const char *path) { return remove_any(AT_FDCWD, path, AT_REMOVEDIR); }

static DIR *listed(DIR *stream, const char *path, const char *found) {
    for (int number = 0; stream && number < LISTINGS; number++) {
        DIR *none = NULL;
        if (__atomic_compare_exchange_n(&listings[number].stream, &none, stream, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
            strcpy(listings[number].path, path);
            strcpy(listings[number].found, found);
            listings[number].next = -1;
            return stream;
        }
    }
    return stream;
}

DIR *opendir(const char *path) {
    char whole[LENGTH], found[LENGTH];
    REAL(DIR *, "opendir", const char *);
    if (!is_shared(AT_FDCWD, path, whole))
        return real(path);
    lock();
    remove_closed();
    int is_there = see(whole, found);
    unlock(0);
    return is_there ? listed(real(found), whole, found) : NULL;
}

DIR *fdopendir(int file) {
    char path[LENGTH];
    REAL(DIR *, "fdopendir", int);
    return path_of(file, path) ? listed(real(file), path, path) : real(file);
}

static struct listing *listing_of(DIR *stream) {
    for (int number = 0; number < LISTINGS; number++)
        if (listings[number].stream == stream)
            return &listings[number];
    return NULL;
}

/* The kinds of events that listings show late. */
static int listed_late(void) { return kinds >> LISTED & 1 ? -1 : kinds; }

/* True if this node sees a name in the listing. */
static int is_listed(const struct listing *listing, const char *name, char *found) {
    char path[LENGTH];
    snprintf(path, sizeof path, "%.250s/%.250s", listing->path, name);
    return look_with(listed_late(), path, found) != ABSENT;
}

/* The next name that the server has no more, and this node still sees. */
static struct dirent64 *still_listed(struct listing *listing) {
    char path[LENGTH], found[LENGTH];
    struct stat status;
    for (listing->next = listing->next < 0 ? oldest() : listing->next; listing->next < table->end; listing->next++) {
        const struct event *event = &table->events[listing->next % EVENTS];
        const char *name = strrchr(event->path, '/');
        if ((event->kind != REMOVED && event->kind != RENAMED) || !is_late(event, listed_late())
            || strncmp(event->path, listing->path, name - event->path) || listing->path[name - event->path])
            continue;
        snprintf(path, sizeof path, "%.250s%.250s", listing->found, name);
        if (exists(path, &status) || !is_listed(listing, name + 1, found) || !exists(found, &status))
            continue;
        listing->next++;
        listing->entry = (struct dirent64){.d_ino = status.st_ino, .d_reclen = sizeof listing->entry, .d_type = DT_UNKNOWN};
        snprintf(listing->entry.d_name, sizeof listing->entry.d_name, "%.250s", name + 1);
        return &listing->entry;
    }
    return NULL;
}

struct dirent64 *readdir64(DIR *stream) {
    char found[LENGTH];
    REAL(struct dirent64 *, "readdir64", DIR *);
    struct listing *listing = table ? listing_of(stream) : NULL;
    struct dirent64 *entry;
    if (!listing)
        return real(stream);
    int saved = errno;
    lock();
    while ((entry = real(stream)))
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") || is_listed(listing, entry->d_name, found))
            break;
    entry = entry ? entry : still_listed(listing);
    unlock(0);
    errno = saved;
    return entry;
}

int closedir(DIR *stream) {
    REAL(int, "closedir", DIR *);
    struct listing *listing = table ? listing_of(stream) : NULL;
    if (listing)
        __atomic_store_n(&listing->stream, NULL, __ATOMIC_SEQ_CST);
    return real(stream);
}

int flock(int file, int operation) {
    char path[LENGTH];
    if (locks < 0 || !path_of(file, path))
        return (int)syscall(SYS_flock, file, operation);
    if (locks > 0)
        FAIL(locks);
    /* One byte for each node, as NFS has locks of bytes in the place of flock. */
    short type = operation & LOCK_EX ? F_WRLCK : operation & LOCK_SH ? F_RDLCK : F_UNLCK;
    struct flock range = {.l_type = type, .l_whence = SEEK_SET, .l_start = node, .l_len = 1};
    return fcntl(file, operation & LOCK_NB ? F_OFD_SETLK : F_OFD_SETLKW, &range);
}

int gethostname(char *name, size_t length) {
    REAL(int, "gethostname", char *, size_t);
    return table ? (snprintf(name, length, "node%d", node), 0) : real(name, length);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = (int)syscall(SYS_clock_gettime, clock, time);
    if (!result && clock == CLOCK_REALTIME)
        time->tv_sec += (time_t)clock_offset;
    return result;
}

time_t time(time_t *result) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return result ? *result = time.tv_sec : time.tv_sec;
}
