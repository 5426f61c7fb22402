/* What the nodes of a shared disk see; see shared_disk.c for the model, which is the only file that includes this. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define LENGTH 512
#define EVENTS (1 << 14)
#define PROCESSES 1024
#define SILLY 256
#define LISTINGS 64

/* Of events; bit 1 << kind of `kinds` says that such are late, and bit LISTINGS that listings show them all late. */
enum kind { CREATED, SEEN, REMOVED, RENAMED, APPENDED, LISTED };
enum view { PRESENT, ABSENT, STALE };

struct event {
    double time;
    int node, kind;
    long aside;  /* number of the kept copy, 0 for none */
    ino_t file;  /* the one that was removed, replaced or appended to */
    long long size;  /* before it was appended to */
    char path[LENGTH], to[LENGTH];
};

struct table {
    pthread_mutex_t lock;
    long asides, end, operations;
    int processes[PROCESSES], nodes[PROCESSES], num_processes;
    struct { char path[LENGTH]; int node; ino_t file; } silly[SILLY];
    struct event events[EVENTS];
};

struct listing {
    DIR *stream;
    char path[LENGTH], found[LENGTH];
    long next;  /* event that may have taken a name away */
    struct dirent64 entry;
};

static struct table *table;
static struct listing listings[LISTINGS];
static char folder[LENGTH], asides[LENGTH];
static int node, kinds, stale, silly, locks = -1;
static unsigned seed;
static double late, clock_offset;
static long quota;

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)
#define FAIL(error) do { errno = (error); return -1; } while (0)

static void lock(void) {
    if (pthread_mutex_lock(&table->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&table->lock);
}

static int unlock(int result) {
    int saved = errno;
    pthread_mutex_unlock(&table->lock);
    errno = saved;
    return result;
}

static double now(void) {
    struct timespec time;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static void register_process(void) {
    if (!table)
        return;
    int number = __atomic_fetch_add(&table->num_processes, 1, __ATOMIC_SEQ_CST) % PROCESSES;
    table->nodes[number] = node;
    table->processes[number] = getpid();
}

/* Makes this process one of a node; `state` is a file of the disk's state, `kept` a folder on the same file system. */
void become_node(const char *below, const char *state, const char *kept, int number, double seconds, int late_kinds,
                 unsigned chance, int is_stale, int is_silly, int flocks, double offset, long operation) {
    int is_new = access(state, F_OK);
    int file = (int)syscall(SYS_openat, AT_FDCWD, state, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof *table))
        abort();
    struct table *mapped = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED)
        abort();
    syscall(SYS_close, file);
    if (is_new) {
        pthread_mutexattr_t shared;
        pthread_mutexattr_init(&shared);
        pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&mapped->lock, &shared);
    }
    snprintf(folder, sizeof folder, "%s", below);
    snprintf(asides, sizeof asides, "%s", kept);
    node = number, late = seconds, kinds = late_kinds, seed = chance, stale = is_stale, silly = is_silly, locks = flocks;
    clock_offset = offset, quota = operation;
    table = mapped;
    register_process();
}

static double setting(const char *name, double otherwise) {
    const char *value = getenv(name);
    return value ? atof(value) : otherwise;
}

__attribute__((constructor)) static void prepare(void) {
    pthread_atfork(NULL, NULL, register_process);
    if (getenv("SHARED_DISK_FOLDER"))
        become_node(getenv("SHARED_DISK_FOLDER"), getenv("SHARED_DISK_STATE"), getenv("SHARED_DISK_ASIDES"),
                    (int)setting("SHARED_DISK_NODE", 0), setting("SHARED_DISK_LATE", 0), (int)setting("SHARED_DISK_KINDS", -1),
                    (unsigned)setting("SHARED_DISK_SEED", 0), (int)setting("SHARED_DISK_STALE", 0),
                    (int)setting("SHARED_DISK_SILLY", 0), (int)setting("SHARED_DISK_FLOCK", -1),
                    setting("SHARED_DISK_CLOCK", 0), (long)setting("SHARED_DISK_QUOTA", 0));
}

static int is_at_or_below(const char *path, const char *top) {
    size_t length = strlen(top);
    return !strncmp(path, top, length) && (!path[length] || path[length] == '/');
}

/* The absolute path of a name below the folder, in `whole`; 0 where it is none. */
static int is_shared(int directory, const char *path, char *whole) {
    char link[64];
    if (!table || !path)
        return 0;
    size_t length = 0;
    if (path[0] != '/') {
        snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
        ssize_t got = syscall(SYS_readlinkat, AT_FDCWD, link, whole, LENGTH - 1);
        if (got <= 0)
            return 0;
        length = got;
        whole[length++] = '/';
    }
    if (length + strlen(path) >= LENGTH)
        return 0;
    strcpy(whole + length, path);
    for (length = strlen(whole); length > 1 && (whole[length - 1] == '/' || !strcmp(whole + length - 2, "/.")); length--)
        whole[length - 1] = 0;
    return is_at_or_below(whole, folder) || is_at_or_below(whole, asides);
}

static int path_of(int file, char *path) {
    char link[64];
    if (!table)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, LENGTH - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0 && (is_at_or_below(path, folder) || is_at_or_below(path, asides));
}

/* After how many seconds this node sees changes in the folder of a path. */
static double lateness(const char *path) {
    const char *end = strrchr(path, '/');
    unsigned hash = 2166136261u ^ seed ^ (unsigned)node << 16;
    for (; path < end; path++)
        hash = (hash ^ (unsigned char)*path) * 16777619u;
    return late / (1 << (hash >> 8) % 3);
}

static int is_late(const struct event *event, int late_kinds) {
    /* That another node has seen a name says nothing about this one. */
    int may_be = event->kind == SEEN || late_kinds >> event->kind & 1;
    return event->node != node && may_be && now() - event->time < lateness(event->kind == RENAMED ? event->to : event->path);
}

/* The first event that may not be seen by all yet. */
static long oldest(void) {
    long first = table->end;
    double since = now() - late;
    while (first > 0 && first > table->end - EVENTS && table->events[(first - 1) % EVENTS].time >= since)
        first--;
    return first;
}

static void name_aside(long number, char *path) { snprintf(path, LENGTH, "%.480s/%ld", asides, number); }

/* Where the server has what this node sees at a path now, where events of some kinds are late. */
static enum view look_with(int late_kinds, const char *path, char *found) {
    char moved[LENGTH];
    size_t absent = 0;
    strcpy(found, path);
    for (long number = oldest(); number < table->end; number++) {
        const struct event *event = &table->events[number % EVENTS];
        const char *name = event->kind == RENAMED ? event->to : event->path;
        if (event->kind == APPENDED)
            continue;
        if (!is_late(event, late_kinds)) {
            /* Of a name of another node in a folder that is not seen yet there is nothing to see either. */
            if (event->kind == REMOVED || absent > strlen(name)
                || (absent && absent < strlen(name) && event->node != node))
                continue;
            if (is_at_or_below(path, name))
                strcpy(found, path), absent = 0;
            else if (is_at_or_below(found, name))
                absent = 0;
        } else if (absent || event->kind == SEEN) {
            continue;
        } else if (event->kind == CREATED) {
            absent = is_at_or_below(found, name) ? strlen(name) : 0;
        } else if (event->kind == RENAMED && is_at_or_below(found, event->path)) {
            snprintf(moved, sizeof moved, "%.250s%.250s", event->to, found + strlen(event->path));
            strcpy(found, moved);
        } else if (event->aside && !strcmp(found, name)) {
            name_aside(event->aside, found);
        } else if (event->kind == RENAMED && is_at_or_below(found, event->to)) {
            absent = strlen(event->to);
        }
    }
    if (absent)
        return ABSENT;
    return stale && is_at_or_below(found, asides) && strcmp(found, path) ? STALE : PRESENT;
}

static enum view look(const char *path, char *found) { return look_with(kinds, path, found); }

/* Where the server makes, renames or removes what this node calls so; 0 and errno where its folder is gone or unseen. */
static int place(const char *path, char *found) {
    char parent[LENGTH];
    size_t length = strrchr(path, '/') - path;
    snprintf(parent, sizeof parent, "%.*s", (int)length, path);
    if (!is_at_or_below(parent, folder)) {
        strcpy(found, path);
        return 1;
    }
    if (look(parent, found) == ABSENT) {
        errno = ENOENT;
        return 0;
    }
    if (is_at_or_below(found, asides)) {
        errno = ESTALE;
        return 0;
    }
    strncat(found, path + length, LENGTH - strlen(found) - 1);
    return 1;
}

/* As `look`, with errno: 0 where nothing is to be seen. */
static int see(const char *path, char *found) {
    enum view view = look(path, found);
    errno = view == STALE ? ESTALE : ENOENT;
    return view == PRESENT;
}

static void note(enum kind kind, const char *path, const char *to, long aside, ino_t file, long long size) {
    struct event *event = &table->events[table->end % EVENTS];
    *event = (struct event){now(), node, kind, aside, file, size, "", ""};
    snprintf(event->path, LENGTH, "%s", path);
    snprintf(event->to, LENGTH, "%s", to);
    table->end++;
}

static int exists(const char *path, struct stat *status) {
    return !syscall(SYS_newfstatat, AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}

/* Keeps what is at a path for those who do not see yet that it goes; the number of the copy. */
static long keep(const char *path, const struct stat *status) {
    char aside[LENGTH];
    long number = ++table->asides;
    name_aside(number, aside);
    if (S_ISDIR(status->st_mode) ? syscall(SYS_mkdirat, AT_FDCWD, aside, 0700) : syscall(SYS_linkat, AT_FDCWD, path, AT_FDCWD, aside, 0))
        return 0;
    return number;
}

/* True if a process of a node has the file open. */
static int is_open(ino_t file, int on) {
    char path[64];
    struct stat status;
    for (int number = 0; number < PROCESSES; number++) {
        snprintf(path, sizeof path, "/proc/%d", table->processes[number]);
        if (!table->processes[number] || table->nodes[number] != on || !exists(path, &status))
            continue;
        for (int open = 0; open < 256; open++) {
            snprintf(path, sizeof path, "/proc/%d/fd/%d", table->processes[number], open);
            if (!syscall(SYS_newfstatat, AT_FDCWD, path, &status, 0) && status.st_ino == file && S_ISREG(status.st_mode))
                return 1;
        }
    }
    return 0;
}

/* Removes the .nfs files that nobody has open any more. */
static void remove_closed(void) {
    for (int number = 0; silly && number < SILLY; number++) {
        char *path = table->silly[number].path;
        if (path[0] && !is_open(table->silly[number].file, table->silly[number].node)) {
            struct stat status;
            long aside = exists(path, &status) ? keep(path, &status) : 0;
            if (!syscall(SYS_unlinkat, AT_FDCWD, path, 0))
                note(REMOVED, path, "", aside, 0, 0);
            path[0] = 0;
        }
    }
}

/* Calls an open file .nfsN instead of removing it; 0 where it is not open. */
static int hide(const char *path, const struct stat *status) {
    char name[LENGTH];
    if (!silly || !S_ISREG(status->st_mode) || !is_open(status->st_ino, node))
        return 0;
    for (int number = 0; number < SILLY; number++)
        if (!table->silly[number].path[0]) {
            int length = (int)(strrchr(path, '/') - path);
            snprintf(name, sizeof name, "%.*s/.nfs%024lx", length, path, (long)status->st_ino);
            if (syscall(SYS_renameat, AT_FDCWD, path, AT_FDCWD, name))
                return 0;
            note(RENAMED, path, name, 0, 0, 0);
            strcpy(table->silly[number].path, name);
            table->silly[number].node = node, table->silly[number].file = status->st_ino;
            return 1;
        }
    abort();
}

/* True for every operation that needs room from one on. */
static int is_over_quota(void) {
    return quota && __atomic_add_fetch(&table->operations, 1, __ATOMIC_SEQ_CST) >= quota;
}
