// Remembers which files had the right SHA-256, so that they are not hashed each time a bundle is
// opened.
//
// For each file, a small record is written to $XDG_CACHE_HOME/dlm-runtime or ~/.cache/dlm-runtime.
// The record contains the file's device, inode, size, modification time, change time and hash. The
// kernel updates the change time whenever the file changes, and programs cannot set it. So if a
// file still has the recorded change time, it still has the recorded hash. There are two
// exceptions: the disk may be damaged, or a root user may change the clock or the blocks of the
// disk. Such changes are detected only if the file is hashed.
//
// No record is written if a later change of the file could stay undetected:
//   - The file changed less than two seconds ago. The time stamp may be too coarse to show a second
//     change. (Git calls such index entries "racy", see gitformat-index and racy-git in Git's
//     documentation.)
//   - The file system is not known to update time stamps at every write. On network file systems
//     and FUSE, other programs decide when time stamps are updated. On tmpfs, writes through mmap
//     do not update them.
// If the user has no cache directory, all files are hashed each time a bundle is opened.
#pragma once

#include <string>

namespace dlm {

enum class Records {
  none,   // always hash the file
  write,  // hash the file; write a record if the hash is right
  use,    // do not hash the file if a record says that the hash is right; otherwise like `write`
};

// Returns true if the file at `path` has the SHA-256 `sha256`, which is in lower-case hex. Throws
// the same errors as sha256_file_hex. Ignores errors when it reads or writes records.
bool has_sha256(const std::string& path, const std::string& sha256, Records records);

// Returns the choice of the user in $DLM_HASH_FILES. "changed" means Records::use, and so does an
// unset or empty variable. "always" means Records::none. Throws an Error with status
// DLM_INVALID_ARGUMENT for any other value.
Records chosen_records();

}  // namespace dlm
