// Writes records of files that had the right SHA-256, and finds and checks these records later.
#include "bundle/file_check.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/sha256.h"

namespace dlm {
namespace {

// A file gets a record only if its last change is at least this long ago. Some file systems store
// times only in whole seconds.
constexpr int64_t kSettledSeconds = 2;
constexpr const char* kFolder = "dlm-runtime";

// Records are written only for these file systems. Each of them is read-only, or updates the change
// time of a file at every write. If a program writes through mmap, the file system updates the
// change time at the first write after a flush, because its page_mkwrite calls file_update_time.
// The magic numbers are from linux/magic.h and from the kernel's fs/.
struct FileSystem {
  uint32_t magic;
  bool is_read_only;
};
constexpr FileSystem kTrusted[] = {
    {0xEF53, false},      // ext2, ext3, ext4
    {0x58465342, false},  // XFS
    {0x9123683E, false},  // Btrfs
    {0xF2F52010, false},  // F2FS
    {0x794C7630, false},  // overlayfs, used by containers
    {0x73717368, true},   // SquashFS
    {0xE0F5E1E2, true},   // EROFS
};

// Returns the text of a file's record. The text changes whenever the file changes, and two files
// never have the same text. So the code can compare records without parsing them.
std::string describe(const struct stat& info, const std::string& sha256) {
  char text[512];
  std::snprintf(text, sizeof text,
                "verified file 1\ndevice %" PRIu64 "\ninode %" PRIu64 "\nbytes %" PRId64
                "\nmodified %" PRId64 ".%09ld\nchanged %" PRId64 ".%09ld\nsha256 %.64s\n",
                uint64_t{info.st_dev}, uint64_t{info.st_ino}, int64_t{info.st_size},
                int64_t{info.st_mtim.tv_sec}, info.st_mtim.tv_nsec, int64_t{info.st_ctim.tv_sec},
                info.st_ctim.tv_nsec, sha256.c_str());
  return text;
}

// Returns the file name of a file's record. There are at most 65,536 names, so that records cannot
// fill the disk. If the records of two files have the same name, each new record replaces the
// record of the other file.
std::string record_name(const struct stat& info) {
  char text[16];
  std::snprintf(text, sizeof text, "%04x",
                static_cast<unsigned>((uint64_t{info.st_dev} + uint64_t{info.st_ino}) & 0xFFFF));
  return text;
}

timespec now() {
  timespec time{};
  clock_gettime(CLOCK_REALTIME, &time);
  return time;
}

bool is_before(const timespec& a, const timespec& b) {
  return a.tv_sec != b.tv_sec ? a.tv_sec < b.tv_sec : a.tv_nsec < b.tv_nsec;
}

bool is_ours_alone(const struct stat& info) {
  return info.st_uid == geteuid() && (info.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// Returns the user's cache directory, as defined in the XDG Base Directory Specification. Returns
// "" if the user has no cache directory. Also returns "" if the program runs with raised
// privileges, because then another user controls its environment.
std::string cache_home() {
  const auto is_absolute = [](const char* path) { return path != nullptr && *path == '/'; };
  const char *const chosen = secure_getenv("XDG_CACHE_HOME"), *const home = secure_getenv("HOME");
  std::string found = is_absolute(chosen) ? chosen : "";
  if (found.empty() && is_absolute(home)) found = std::string(home) + "/.cache";
  while (found.size() > 1 && found.back() == '/') found.pop_back();
  return found;
}

// Creates the folder of records and its parent if they are missing. Creates no folder in the
// directory of another user, because that user could not use the folder later.
void make_folder(const std::string& home) {
  const std::string above = home.substr(0, home.find_last_of('/') + 1);
  struct stat info{};
  if (stat(above.c_str(), &info) == 0 && info.st_uid == geteuid()) mkdir(home.c_str(), S_IRWXU);
  if (stat(home.c_str(), &info) == 0 && info.st_uid == geteuid())
    mkdir((home + "/" + kFolder).c_str(), S_IRWXU);
}

// Opens the folder of records. If other users can change the folder, returns a descriptor that is
// not open.
Descriptor open_folder(bool is_made) {
  const std::string home = cache_home();
  if (home.empty()) return Descriptor(-1);
  if (is_made) make_folder(home);
  const int number =
      open((home + "/" + kFolder).c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct stat info{};
  if (number >= 0 && (fstat(number, &info) != 0 || !is_ours_alone(info))) {
    close(number);
    return Descriptor(-1);
  }
  return Descriptor(number);
}

bool is_recorded(const struct stat& info, const std::string& sha256) {
  const Descriptor folder = open_folder(false);
  if (!folder.is_open()) return false;
  const Descriptor file(openat(folder.number(), record_name(info).c_str(),
                               O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat record{};
  if (!file.is_open() || fstat(file.number(), &record) != 0 || !S_ISREG(record.st_mode) ||
      !is_ours_alone(record))
    return false;
  // If the record's time stamp is in the future, the clock was set back. Then a changed file may
  // get the same time stamp as before.
  if (is_before(now(), record.st_mtim)) return false;
  const std::string expected = describe(info, sha256);
  char found[512];
  const ssize_t bytes = read(file.number(), found, sizeof found);
  return bytes >= 0 && std::string(found, static_cast<size_t>(bytes)) == expected;
}

void record(const struct stat& info, const std::string& sha256) {
  const Descriptor folder = open_folder(true);
  if (!folder.is_open()) return;
  const std::string name = record_name(info), text = describe(info, sha256),
                    partial = name + ".partial-" + std::to_string(getpid());
  bool is_written = false;
  {
    const Descriptor file(openat(folder.number(), partial.c_str(),
                                 O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                                 S_IRUSR | S_IWUSR));
    if (!file.is_open()) return;
    is_written =
        write(file.number(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
  }
  if (!is_written || renameat(folder.number(), partial.c_str(), folder.number(), name.c_str()) != 0)
    unlinkat(folder.number(), partial.c_str(), 0);
}

// Returns true if every later change of the file will update its change time.
bool will_show_changes(int descriptor, const struct stat& info) {
  timespec settled = info.st_ctim;
  settled.tv_sec += kSettledSeconds;
  if (!is_before(settled, now())) return false;
  struct statfs system{};
  if (fstatfs(descriptor, &system) != 0) return false;
  for (const FileSystem& trusted : kTrusted) {
    if (static_cast<uint32_t>(system.f_type) != trusted.magic) continue;
    // After a write through mmap has changed a page, further writes to this page do not update the
    // change time until the page is flushed. fsync flushes all pages.
    return trusted.is_read_only || fsync(descriptor) == 0;
  }
  return false;
}

}  // namespace

bool has_sha256(const std::string& path, const std::string& sha256, Records records) {
  if (records == Records::none) return sha256_file_hex(path) == sha256;
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat before{}, after{};
  if (!file.is_open() || fstat(file.number(), &before) != 0 || !S_ISREG(before.st_mode))
    return sha256_file_hex(path) == sha256;  // throws if the file cannot be read
  if (records == Records::use && is_recorded(before, sha256)) return true;
  // The order of these steps matters. First flush the file, then hash it, and then compare its time
  // stamps.
  const bool shows_changes = will_show_changes(file.number(), before);
  const bool is_right = sha256_file_hex(file.number(), path) == sha256;
  if (is_right && shows_changes && fstat(file.number(), &after) == 0 &&
      describe(before, sha256) == describe(after, sha256))
    record(before, sha256);
  return is_right;
}

Records chosen_records() {
  const char* const wanted = std::getenv("DLM_HASH_FILES");
  if (wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, "changed") == 0)
    return Records::use;
  if (std::strcmp(wanted, "always") == 0) return Records::none;
  fail(DLM_INVALID_ARGUMENT, "DLM_HASH_FILES is \"%.40s\"; set \"changed\" or \"always\"", wanted);
}

}  // namespace dlm
