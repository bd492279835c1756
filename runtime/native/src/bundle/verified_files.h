// Remembers which files had the right SHA-256, so that opening a bundle need not hash them again.
//
// For each file, a small record is written to $XDG_CACHE_HOME/dlm-runtime or ~/.cache/dlm-runtime.
// It has the file's device, inode, size, modification time, change time and hash. The kernel
// updates the change time at every change, and programs cannot set it. So a file that still has the
// recorded change time also has the recorded hash. A record does not detect disk damage. It also
// does not detect root changing the clock or the blocks of the disk. To detect these, hash the
// file.
//
// In these cases, a later change could go unnoticed, so no record is written:
//   - The file changed less than two seconds ago. Its time stamp may be too coarse to tell two
//   changes
//     apart. (Git calls such index entries "racy", see gitformat-index and racy-git in its
//     documentation.)
//   - The file system is not known to update time stamps at every write. Network file systems and
//   FUSE
//     depend on other programs for this, and tmpfs misses writes through mmap.
// If the user has no cache directory of their own, files are hashed at every open.
#pragma once

#include <string>

namespace dlm {

enum class Records {
  none,   // always hash the file
  write,  // hash the file, and record it if its hash was right
  use,    // if a record says that the hash was right, do not hash the file; otherwise like `write`
};

// True if the file at `path` has the SHA-256 `sha256`, in lower-case hex. Throws like
// sha256_file_hex. If a record cannot be read or written, that is not an error.
bool has_sha256(const std::string& path, const std::string& sha256, Records records);

// What the user chose with $DLM_HASH_FILES. "changed" means Records::use, and is also the default
// if the variable is unset or empty. "always" means Records::none. Throws
// Error(DLM_INVALID_ARGUMENT) for any other value.
Records chosen_records();

}  // namespace dlm
