// A file that is mapped into memory for the lifetime of the object.
#pragma once

#include <cstddef>
#include <string>

#include "dlm_runtime.h"

namespace dlm {

class MappedFile {
 public:
  // Maps the file at `path`. If `reads_all` is true, the operating system reads the whole file now,
  // so that later accesses cause no page faults. Throws an Error with status DLM_NOT_FOUND if the
  // file is missing. Throws an Error with status `refused` if the file is not a plain file or
  // cannot be read.
  MappedFile(const std::string& path, dlm_status refused, bool reads_all);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return static_cast<const std::byte*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace dlm
