// Remembers which files had the right SHA-256, so that opening a bundle need not hash them again.
//
// For each file, a small record is written to $XDG_CACHE_HOME/dlm-runtime or ~/.cache/dlm-runtime.
// The record contains the file's device, inode, size, modification time, change time and hash. The
// kernel updates the change time at every change, and programs cannot set the change time. So if a
// file still has the recorded change time, the file still has the recorded hash. There are two
// exceptions. The disk may be damaged, and a root user may change the clock or the blocks of the
// disk. These changes are detected only if the file is hashed.
//
// In these cases, a later change could stay undetected, so no record is written:
//   - The file changed less than two seconds ago. The time stamp may be too coarse to show a second
//     change. (Git calls such index entries "racy", see gitformat-index and racy-git in Git's
//     documentation.)
//   - The file system is not known to update time stamps at every write. Network file systems and
//     FUSE depend on other programs to update time stamps. tmpfs does not update time stamps at
//     writes through mmap.
// If the user has no cache directory, files are hashed each time a bundle is opened.
#pragma once

#include <string>

namespace dlm {

enum class Records {
  none,   // always hash the file
  write,  // hash the file, and write a record if the hash is right
  use,    // if a record says that the hash is right, do not hash the file; otherwise like `write`
};

// Returns true if the file at `path` has the SHA-256 `sha256`, which is in lower-case hex. Throws
// the same errors as sha256_file_hex. A record that cannot be read or written is not an error.
bool has_sha256(const std::string& path, const std::string& sha256, Records records);

// Returns the user's choice in $DLM_HASH_FILES. "changed" means Records::use. If the variable is
// unset or empty, the result is also Records::use. "always" means Records::none. Throws
// Error(DLM_INVALID_ARGUMENT) for any other value.
Records chosen_records();

}  // namespace dlm
