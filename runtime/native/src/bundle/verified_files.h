// Remembers which files had the right SHA-256, so that they are not hashed on every open.
//
// A record is a small file in the user's cache directory, $XDG_CACHE_HOME/dlm-runtime or
// ~/.cache/dlm-runtime. It holds the file's device, inode, size, modification and change time, and
// the hash. The kernel sets the change time whenever it changes the file, and programs cannot
// choose it, so a file with the recorded change time still has the recorded hash. Records detect
// neither damage of the disk nor what root does to the clock or to the disk's blocks: hash the
// file for these.
//
// A record is not written if a later change of the file could go unnoticed:
//   - the file changed less than two seconds ago: its time stamp may be too coarse to tell two
//     changes apart (the "racy" entries of git's index, gitformat-index and racy-git in git's
//     documentation);
//   - its file system is not in the list of those that update time stamps on every write: network
//     file systems and FUSE leave that to others, and tmpfs does not notice writes through mmap.
// Without a cache directory of the user's own there are no records: every open hashes the files.
#pragma once

#include <string>

namespace dlm {

enum class Records {
  none,   // hash the file
  write,  // hash the file, and record that its hash was right
  use,    // do not hash the file if a record says that its hash was right; otherwise as `write`
};

// Whether the file at `path` has the SHA-256 `sha256`, in lower-case hex. Throws what
// sha256_file_hex does. A record that cannot be read or written is not an error.
bool has_sha256(const std::string& path, const std::string& sha256, Records records);

// The user's choice in $DLM_HASH_FILES: "changed" (also if unset or empty) is Records::use,
// "always" is Records::none. Throws Error(DLM_INVALID_ARGUMENT) for any other value.
Records chosen_records();

}  // namespace dlm
