// Remembers which files had the right SHA-256, so that opening a bundle need not hash them again.
//
// A record is a small file in $XDG_CACHE_HOME/dlm-runtime or ~/.cache/dlm-runtime. It has the
// file's device, inode, size, modification time, change time and hash. The kernel sets the change
// time on every change, and programs cannot choose it, so a file with the recorded change time
// still has the recorded hash. Records do not detect disk damage, nor changes by root to the clock
// or to the disk's blocks; hash the file to detect those.
//
// A record is not written if a later change of the file could go unnoticed:
//   - the file changed less than two seconds ago: its time stamp may be too coarse to tell two
//     changes apart (the "racy" entries of git's index, gitformat-index and racy-git in git's
//     documentation);
//   - its file system is not known to update time stamps on every write: for network file systems
//     and FUSE this depends on others, and tmpfs misses writes through mmap.
// Without a cache directory that belongs to the user, every open hashes the files.
#pragma once

#include <string>

namespace dlm {

enum class Records {
  none,   // hash the file
  write,  // hash the file, and record that its hash was right
  use,    // do not hash the file if a record says that its hash was right; otherwise as `write`
};

// True if the file at `path` has the SHA-256 `sha256`, in lower-case hex. Throws like
// sha256_file_hex. Failing to read or write a record is not an error.
bool has_sha256(const std::string& path, const std::string& sha256, Records records);

// The user's choice in $DLM_HASH_FILES: "changed" (also if unset or empty) is Records::use,
// "always" is Records::none. Throws Error(DLM_INVALID_ARGUMENT) for any other value.
Records chosen_records();

}  // namespace dlm
