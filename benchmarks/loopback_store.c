/* An object store on loopback with a latency, a rate per connection and a rate of the link that all connections share.
 *
 * One thread, epoll and sendfile, so that the server takes little of the processor that is being measured. It serves
 * the files below a folder: the first part of a path is the bucket. GET and HEAD (with a range), ListObjectsV2, and for
 * readers of plain HTTP a page of links for each folder. Signatures are not checked. loopback_store.py compiles it,
 * starts it, and documents its counters and faults.
 *
 * Rates are kept by virtual clocks: a clock advances by bytes / rate for each chunk, and a chunk may be sent once the
 * clock is not ahead of the time. A clock that has fallen behind catches up by at most BURST seconds, so that a late
 * wake-up does not lower the rate.
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CHUNK (128 << 10)
#define INPUT (16 << 10)
#define BURST 0.005
#define MAX_CONNECTIONS 4096
#define MAX_KEYS 1000

enum state { READING, WAITING, SENDING };

struct text {
    char *bytes;
    size_t length, capacity;
};

struct connection {
    int fd, file;
    enum state state;
    bool blocked, close_after, is_control;
    char input[INPUT + 1];
    size_t input_length;
    struct text head; /* the headers, and a body that is not a file */
    size_t head_sent, head_body;
    off_t offset;
    long long remaining;
    double ready_at, clock;
};

static struct connection *connections[MAX_CONNECTIONS];
static int connection_count, next_turn;
static int poller;
static const char *root;
static double latency = 0.03, connection_rate = 60e6, link_rate = 200e6, link_clock;
static FILE *access_log;

static struct {
    long long requests, gets, heads, lists, body_bytes, faults, accepted, in_flight, most_in_flight;
    double first, last;
} counts;

static struct {
    double status_rate, cut_rate, stall_rate;
    int status, burst;
    unsigned long long random;
} faults = {.status = 503, .random = 88172645463325252ull};

static double now(void) {
    struct timespec spec;
    clock_gettime(CLOCK_MONOTONIC, &spec);
    return spec.tv_sec + spec.tv_nsec * 1e-9;
}

static bool happens(double rate) {
    if (rate <= 0) return false;
    faults.random ^= faults.random << 13;
    faults.random ^= faults.random >> 7;
    faults.random ^= faults.random << 17;
    return (double)(faults.random >> 11) / (1ull << 53) < rate;
}

/* --- text */

static void append(struct text *text, const char *format, ...) {
    for (;;) {
        va_list values;
        va_start(values, format);
        size_t room = text->capacity - text->length;
        int length = vsnprintf(text->bytes ? text->bytes + text->length : NULL, room, format, values);
        va_end(values);
        if (length < 0) exit(1);
        if ((size_t)length < room) {
            text->length += length;
            return;
        }
        text->capacity = 2 * (text->capacity + length + 64);
        text->bytes = realloc(text->bytes, text->capacity);
        if (!text->bytes) exit(1);
    }
}

static void append_escaped(struct text *text, const char *value) {
    for (; *value; value++) {
        if (*value == '&') append(text, "&amp;");
        else if (*value == '<') append(text, "&lt;");
        else if (*value == '>') append(text, "&gt;");
        else append(text, "%c", *value);
    }
}

static void decode_percent(char *value, bool is_query) {
    char *out = value;
    for (; *value; value++) {
        unsigned byte;
        if (*value == '%' && sscanf(value + 1, "%2x", &byte) == 1 && value[1] && value[2]) {
            *out++ = byte;
            value += 2;
        } else
            *out++ = is_query && *value == '+' ? ' ' : *value;
    }
    *out = 0;
}

/* Copies the value of a query parameter; returns whether it is present. */
static bool parameter(const char *query, const char *name, char *value, size_t size) {
    size_t length = strlen(name);
    *value = 0;
    while (query && *query) {
        const char *end = strchrnul(query, '&');
        if (!strncmp(query, name, length) && (query[length] == '=' || query + length == end)) {
            const char *start = query[length] == '=' ? query + length + 1 : end;
            snprintf(value, size, "%.*s", (int)(end - start), start);
            decode_percent(value, true);
            return true;
        }
        query = *end ? end + 1 : end;
    }
    return false;
}

/* Copies the value of a header; returns whether it is present. */
static bool header(const char *request, const char *name, char *value, size_t size) {
    size_t length = strlen(name);
    for (const char *line = strstr(request, "\r\n"); line && line[2] != '\r'; line = strstr(line + 2, "\r\n")) {
        if (!strncasecmp(line + 2, name, length) && line[2 + length] == ':') {
            const char *start = line + 3 + length + strspn(line + 3 + length, " ");
            snprintf(value, size, "%.*s", (int)strcspn(start, "\r"), start);
            return true;
        }
    }
    return false;
}

static void http_time(time_t time, char *value, size_t size, const char *format) {
    struct tm parts;
    gmtime_r(&time, &parts);
    strftime(value, size, format, &parts);
}

/* --- answers */

static void watch(struct connection *connection, unsigned events) {
    struct epoll_event event = {.events = events, .data.ptr = connection};
    epoll_ctl(poller, EPOLL_CTL_MOD, connection->fd, &event);
}

static void begin_answer(struct connection *connection, int status, long long length) {
    char date[64];
    http_time(time(NULL), date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT");
    const char *reason = status == 200 ? "OK" : status == 206 ? "Partial Content" : "Error";
    append(&connection->head, "HTTP/1.1 %d %s\r\nDate: %s\r\nServer: loopback\r\nContent-Length: %lld\r\n", status, reason,
           date, length);
    if (connection->close_after) append(&connection->head, "Connection: close\r\n");
}

static void answer_text(struct connection *connection, int status, const char *type, struct text *body, bool with_body) {
    begin_answer(connection, status, body->length);
    append(&connection->head, "Content-Type: %s\r\n\r\n", type);
    if (with_body && body->length) {
        append(&connection->head, "%.*s", (int)body->length, body->bytes);
        connection->head_body = body->length;
    }
    free(body->bytes);
}

static void answer_error(struct connection *connection, int status, const char *code, bool with_body) {
    struct text body = {0};
    append(&body, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>%s</Message></Error>", code,
           code);
    answer_text(connection, status, "application/xml", &body, with_body);
}

static void answer_control(struct connection *connection, const char *path, const char *query) {
    char value[64];
    struct text body = {0};
    if (!strcmp(path, "/_store/faults")) {
        memset(&faults, 0, sizeof faults - sizeof faults.random);
        faults.status = parameter(query, "status", value, sizeof value) ? atoi(value) : 503;
        if (parameter(query, "status_rate", value, sizeof value)) faults.status_rate = atof(value);
        if (parameter(query, "cut_rate", value, sizeof value)) faults.cut_rate = atof(value);
        if (parameter(query, "stall_rate", value, sizeof value)) faults.stall_rate = atof(value);
        if (parameter(query, "burst", value, sizeof value)) faults.burst = atoi(value);
        if (parameter(query, "seed", value, sizeof value)) faults.random = 88172645463325252ull ^ (strtoull(value, 0, 10) << 20);
    }
    if (!strcmp(path, "/_store/reset")) {
        long long in_flight = counts.in_flight;
        memset(&counts, 0, sizeof counts);
        counts.in_flight = in_flight;
        if (access_log) {
            rewind(access_log);
            if (ftruncate(fileno(access_log), 0)) exit(1);
        }
    }
    if (access_log) fflush(access_log);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu = usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
    append(&body,
           "{\"requests\": %lld, \"gets\": %lld, \"heads\": %lld, \"lists\": %lld, \"body_bytes\": %lld, \"faults\": %lld, "
           "\"connections\": %lld, \"in_flight\": %lld, \"most_in_flight\": %lld, \"seconds\": %.6f, \"cpu_seconds\": %.6f}\n",
           counts.requests, counts.gets, counts.heads, counts.lists, counts.body_bytes, counts.faults, counts.accepted,
           counts.in_flight, counts.most_in_flight, counts.last - counts.first, cpu);
    answer_text(connection, 200, "application/json", &body, true);
}

/* --- listings */

struct keys {
    char **names;
    size_t count, capacity;
};

static void collect_keys(const char *folder, const char *key, struct keys *keys) {
    DIR *opened = opendir(folder);
    if (!opened) return;
    for (struct dirent *entry; (entry = readdir(opened));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        char *path, *name;
        if (asprintf(&path, "%s/%s", folder, entry->d_name) < 0) exit(1);
        if (asprintf(&name, "%s%s%s", key, *key ? "/" : "", entry->d_name) < 0) exit(1);
        struct stat info;
        if (!stat(path, &info) && S_ISDIR(info.st_mode)) {
            collect_keys(path, name, keys);
            free(name);
        } else {
            if (keys->count == keys->capacity) {
                keys->capacity = 2 * keys->capacity + 64;
                keys->names = realloc(keys->names, keys->capacity * sizeof *keys->names);
                if (!keys->names) exit(1);
            }
            keys->names[keys->count++] = name;
        }
        free(path);
    }
    closedir(opened);
}

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void append_object(struct text *body, const char *folder, const char *key) {
    char *path, date[64];
    struct stat info;
    if (asprintf(&path, "%s/%s", folder, key) < 0) exit(1);
    if (!stat(path, &info)) {
        http_time(info.st_mtime, date, sizeof date, "%Y-%m-%dT%H:%M:%S.000Z");
        append(body, "<Contents><Key>");
        append_escaped(body, key);
        append(body, "</Key><LastModified>%s</LastModified><ETag>\"%llx-%llx\"</ETag><Size>%lld</Size>", date,
               (long long)info.st_size, (long long)info.st_mtime, (long long)info.st_size);
        append(body, "<StorageClass>STANDARD</StorageClass></Contents>");
    }
    free(path);
}

static void answer_list(struct connection *connection, const char *bucket, const char *query) {
    char prefix[2048], delimiter[16], after[2048], value[64], last[2048] = "";
    char *folder;
    struct keys keys = {0};
    struct text body = {0}, prefixes = {0};
    if (asprintf(&folder, "%s/%s", root, bucket) < 0) exit(1);
    parameter(query, "prefix", prefix, sizeof prefix);
    parameter(query, "delimiter", delimiter, sizeof delimiter);
    if (!parameter(query, "continuation-token", after, sizeof after)) parameter(query, "start-after", after, sizeof after);
    long most = parameter(query, "max-keys", value, sizeof value) ? atol(value) : MAX_KEYS;
    if (most > MAX_KEYS) most = MAX_KEYS;
    collect_keys(folder, "", &keys);
    qsort(keys.names, keys.count, sizeof *keys.names, compare_names);
    append(&body, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
    append(&body, "<Name>%s</Name><Prefix>", bucket);
    append_escaped(&body, prefix);
    append(&body, "</Prefix><MaxKeys>%ld</MaxKeys>", most);
    long listed = 0;
    bool is_truncated = false;
    for (size_t i = 0; i < keys.count; i++) {
        const char *key = keys.names[i];
        if (strncmp(key, prefix, strlen(prefix)) || strcmp(key, after) <= 0) continue;
        if (*after && !strncmp(key, after, strlen(after)) && after[strlen(after) - 1] == '/') continue;
        const char *end = *delimiter ? strstr(key + strlen(prefix), delimiter) : NULL;
        char group[2048] = "";
        if (end) snprintf(group, sizeof group, "%.*s", (int)(end - key + strlen(delimiter)), key);
        if (end && !strcmp(group, last)) continue;
        if (listed == most) {
            is_truncated = true;
            break;
        }
        listed++;
        if (end) {
            append(&prefixes, "<CommonPrefixes><Prefix>");
            append_escaped(&prefixes, group);
            append(&prefixes, "</Prefix></CommonPrefixes>");
        } else
            append_object(&body, folder, key);
        snprintf(last, sizeof last, "%s", end ? group : key);
    }
    if (prefixes.length) append(&body, "%s", prefixes.bytes);
    append(&body, "<KeyCount>%ld</KeyCount><IsTruncated>%s</IsTruncated>", listed, is_truncated ? "true" : "false");
    if (is_truncated) {
        append(&body, "<NextContinuationToken>");
        append_escaped(&body, last);
        append(&body, "</NextContinuationToken>");
    }
    append(&body, "</ListBucketResult>");
    for (size_t i = 0; i < keys.count; i++) free(keys.names[i]);
    free(keys.names);
    free(prefixes.bytes);
    free(folder);
    counts.lists++;
    answer_text(connection, 200, "application/xml", &body, true);
}

static void answer_links(struct connection *connection, const char *folder, bool with_body) {
    struct dirent **entries;
    struct text body = {0};
    int count = scandir(folder, &entries, NULL, alphasort);
    append(&body, "<html><body>\n");
    for (int i = 0; i < count; i++) {
        bool is_folder = entries[i]->d_type == DT_DIR;
        if (entries[i]->d_name[0] != '.')
            append(&body, "<a href=\"%s%s\">%s</a>\n", entries[i]->d_name, is_folder ? "/" : "", entries[i]->d_name);
        free(entries[i]);
    }
    if (count >= 0) free(entries);
    append(&body, "</body></html>\n");
    counts.lists++;
    answer_text(connection, 200, "text/html", &body, with_body);
}

/* --- objects */

static void answer_object(struct connection *connection, const char *request, const char *path, bool with_body) {
    char *name, range[128], date[64];
    struct stat info;
    if (asprintf(&name, "%s%s", root, path) < 0) exit(1);
    int file = open(name, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &info)) {
        answer_error(connection, 404, "NoSuchKey", with_body);
    } else if (S_ISDIR(info.st_mode)) {
        if (path[strlen(path) - 1] == '/') answer_links(connection, name, with_body);
        else if (!strchr(path + 1, '/')) answer_error(connection, 200, "Bucket", false); /* HeadBucket */
        else answer_error(connection, 404, "NoSuchKey", with_body);
    } else {
        long long size = info.st_size, start = 0, stop = size;
        bool is_range = false;
        if (header(request, "Range", range, sizeof range) && !strncmp(range, "bytes=", 6)) {
            char *dash = strchr(range, '-');
            is_range = dash != NULL;
            if (dash == range + 6) start = size - atoll(dash + 1) > 0 ? size - atoll(dash + 1) : 0;
            else if (dash) {
                start = atoll(range + 6);
                if (dash[1] && atoll(dash + 1) + 1 < size) stop = atoll(dash + 1) + 1;
            }
        }
        if (is_range && start >= stop) {
            answer_error(connection, 416, "InvalidRange", with_body);
        } else {
            begin_answer(connection, is_range ? 206 : 200, stop - start);
            http_time(info.st_mtime, date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT");
            append(&connection->head, "Last-Modified: %s\r\nETag: \"%llx-%llx\"\r\nAccept-Ranges: bytes\r\n", date, size,
                   (long long)info.st_mtime);
            append(&connection->head, "Content-Type: application/octet-stream\r\n");
            if (is_range) append(&connection->head, "Content-Range: bytes %lld-%lld/%lld\r\n", start, stop - 1, size);
            append(&connection->head, "\r\n");
            if (with_body) {
                connection->file = file;
                connection->offset = start;
                connection->remaining = stop - start;
                file = -1;
            }
        }
    }
    if (file >= 0) close(file);
    free(name);
}

/* --- requests */

static void close_connection(struct connection *connection) {
    if (connection->state != READING && !connection->is_control) counts.in_flight--;
    close(connection->fd);
    if (connection->file >= 0) close(connection->file);
    free(connection->head.bytes);
    for (int i = 0; i < connection_count; i++)
        if (connections[i] == connection) connections[i] = connections[--connection_count];
    free(connection);
}

static void handle_request(struct connection *connection, char *request) {
    char method[16] = "", target[8192] = "", range[128] = "", value[64];
    if (sscanf(request, "%15s %8191s", method, target) != 2) *method = 0;
    char *query = strchr(target, '?');
    if (query) *query++ = 0;
    decode_percent(target, false);
    bool is_head = !strcmp(method, "HEAD"), is_get = !strcmp(method, "GET");
    connection->close_after = header(request, "Connection", value, sizeof value) && !strcasecmp(value, "close");
    connection->is_control = !strncmp(target, "/_store/", 8);
    double time = now();
    connection->ready_at = time;
    if (connection->is_control) {
        answer_control(connection, target, query);
    } else {
        connection->ready_at += latency;
        counts.requests++;
        counts.gets += is_get;
        counts.heads += is_head;
        if (counts.requests == 1) counts.first = time;
        if (++counts.in_flight > counts.most_in_flight) counts.most_in_flight = counts.in_flight;
        header(request, "Range", range, sizeof range);
        char *rest = target[0] == '/' ? strchr(target + 1, '/') : NULL;
        bool is_bucket = target[0] == '/' && target[1] && (!rest || !rest[1]);
        bool is_failed = faults.burst > 0 || happens(faults.status_rate);
        if (faults.burst > 0) faults.burst--;
        counts.faults += is_failed;
        if (is_failed) {
            answer_error(connection, faults.status, faults.status == 429 ? "TooManyRequests" : "SlowDown", !is_head);
        } else if ((!is_get && !is_head) || strstr(target, "..") || target[0] != '/') {
            connection->close_after = true;
            answer_error(connection, 501, "NotImplemented", !is_head);
        } else if (is_bucket && is_get && query && parameter(query, "list-type", value, sizeof value)) {
            if (rest) *rest = 0;
            answer_list(connection, target + 1, query);
        } else {
            answer_object(connection, request, target, !is_head);
            if (connection->remaining && happens(faults.cut_rate)) {
                connection->remaining /= 2;
                connection->close_after = true;
                counts.faults++;
            } else if (connection->remaining && happens(faults.stall_rate)) {
                connection->ready_at = 1e300; /* never */
                counts.faults++;
            }
        }
    }
    if (access_log && !connection->is_control)
        fprintf(access_log, "%.6f\t%s\t%s\t%s\t%lld\n", time, method, target, range, connection->remaining);
    connection->state = WAITING;
    watch(connection, EPOLLRDHUP);
}

/* Handles a request if all of it has arrived. Requests have no body: others are answered, and the connection closed. */
static void take_request(struct connection *connection) {
    connection->input[connection->input_length] = 0;
    char *end = strstr(connection->input, "\r\n\r\n");
    if (!end) {
        if (connection->input_length == INPUT) close_connection(connection);
        return;
    }
    size_t length = end + 4 - connection->input;
    char request[INPUT + 1];
    memcpy(request, connection->input, length);
    request[length] = 0;
    memmove(connection->input, connection->input + length, connection->input_length - length);
    connection->input_length -= length;
    handle_request(connection, request);
}

static void receive(struct connection *connection) {
    ssize_t length =
        recv(connection->fd, connection->input + connection->input_length, INPUT - connection->input_length, 0);
    if (length < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (length <= 0) {
        close_connection(connection);
        return;
    }
    connection->input_length += length;
    take_request(connection);
}

static void finish_answer(struct connection *connection) {
    if (!connection->is_control) {
        counts.in_flight--;
        counts.last = now();
    }
    connection->state = READING;
    if (connection->file >= 0) close(connection->file);
    connection->file = -1;
    connection->head.length = connection->head_sent = connection->head_body = 0;
    if (connection->close_after) {
        close_connection(connection);
        return;
    }
    watch(connection, EPOLLIN);
    if (connection->input_length) take_request(connection);
}

/* Sends the headers, or a chunk of the file. Returns whether the connection may have more to send now. */
static bool send_some(struct connection *connection, double time) {
    ssize_t sent;
    if (connection->head_sent < connection->head.length) {
        sent = send(connection->fd, connection->head.bytes + connection->head_sent,
                    connection->head.length - connection->head_sent, MSG_NOSIGNAL | (connection->remaining ? MSG_MORE : 0));
        if (sent > 0) {
            connection->head_sent += sent;
            if (connection->head_sent == connection->head.length && !connection->is_control)
                counts.body_bytes += connection->head_body;
        }
    } else {
        size_t size = connection->remaining < CHUNK ? connection->remaining : CHUNK;
        sent = sendfile(connection->fd, connection->file, &connection->offset, size);
        if (sent == 0) sent = -1, errno = EIO; /* the file became shorter */
        if (sent > 0) {
            connection->remaining -= sent;
            counts.body_bytes += sent;
        }
    }
    if (sent < 0) {
        if (errno == EAGAIN || errno == EINTR) {
            connection->blocked = true;
            watch(connection, EPOLLOUT | EPOLLRDHUP);
        } else
            close_connection(connection);
        return false;
    }
    if (!connection->is_control) {
        if (connection->clock < time - BURST) connection->clock = time - BURST;
        if (link_clock < time - BURST) link_clock = time - BURST;
        if (connection_rate > 0) connection->clock += sent / connection_rate;
        if (link_rate > 0) link_clock += sent / link_rate;
    }
    if (connection->head_sent == connection->head.length && !connection->remaining) {
        finish_answer(connection);
        return false;
    }
    return true;
}

/* Sends what the rates allow, a chunk a connection in turn, and returns the seconds until more is allowed. */
static double send_all(void) {
    double time = now(), next = 1.0;
    for (bool has_more = true; has_more;) {
        has_more = false;
        int count = connection_count;
        for (int i = 0; i < count && i < connection_count; i++) {
            struct connection *connection = connections[(next_turn + i) % connection_count];
            if (connection->state == WAITING && connection->ready_at <= time) {
                connection->state = SENDING;
                connection->clock = time;
            }
            if (connection->state != SENDING || connection->blocked) continue;
            if (!connection->is_control && connection->clock > time) continue;
            if (!connection->is_control && link_clock > time) {
                next_turn = (next_turn + i) % connection_count;
                has_more = false;
                goto wait;
            }
            has_more |= send_some(connection, time);
        }
        time = now();
    }
wait:
    for (int i = 0; i < connection_count; i++) {
        struct connection *connection = connections[i];
        double at = connection->state == WAITING ? connection->ready_at : connection->clock;
        if (!connection->is_control && link_clock > at) at = link_clock;
        if (connection->state != READING && !connection->blocked && at - time < next) next = at - time;
    }
    return next > 0 ? next : 0;
}

static void accept_all(int listener) {
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        if (connection_count == MAX_CONNECTIONS) {
            close(fd);
            continue;
        }
        int one = 1, buffer = 512 << 10; /* what is in the buffer counts as sent: keep it small */
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
        struct connection *connection = calloc(1, sizeof *connection);
        if (!connection) exit(1);
        connection->fd = fd;
        connection->file = -1;
        connections[connection_count++] = connection;
        counts.accepted++;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

static int listen_on(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1024)) {
        perror("listen");
        exit(1);
    }
    getsockname(listener, (struct sockaddr *)&address, &length);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return listener;
}

int main(int count, char **values) {
    int port = 0, option;
    while ((option = getopt(count, values, "l:c:b:p:a:")) != -1) {
        if (option == 'l') latency = atof(optarg);
        else if (option == 'c') connection_rate = atof(optarg);
        else if (option == 'b') link_rate = atof(optarg);
        else if (option == 'p') port = atoi(optarg);
        else if (option == 'a') access_log = fopen(optarg, "w");
        else return 2;
    }
    if (optind + 1 != count) {
        fprintf(stderr, "usage: %s [-l seconds] [-c bytes/s] [-b bytes/s] [-p port] [-a log] folder\n", values[0]);
        return 2;
    }
    root = values[optind];
    signal(SIGPIPE, SIG_IGN);
    poller = epoll_create1(EPOLL_CLOEXEC);
    int listener = listen_on(port), parent = STDIN_FILENO;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &listener};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    event.data.ptr = &parent; /* its end of file says that the parent has gone */
    epoll_ctl(poller, EPOLL_CTL_ADD, parent, &event);
    for (double wait = 1.0;;) {
        struct epoll_event events[256];
        int ready = epoll_wait(poller, events, 256, (int)(wait * 1000 + 0.999));
        for (int i = 0; i < ready; i++) {
            if (events[i].data.ptr == &listener) accept_all(listener);
            else if (events[i].data.ptr == &parent) return 0;
            else {
                struct connection *connection = events[i].data.ptr;
                if (connection->state == READING) receive(connection);
                else if (events[i].events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP)) close_connection(connection);
                else if (connection->blocked) {
                    connection->blocked = false;
                    watch(connection, EPOLLRDHUP);
                }
            }
        }
        wait = send_all();
    }
}
