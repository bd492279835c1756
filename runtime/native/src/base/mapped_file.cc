#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "base/descriptor.h"
#include "base/error.h"

namespace dlm {

MappedFile::MappedFile(const std::string& path, dlm_status refused, bool reads_all) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat information{};
  if (!file.is_open() || fstat(file.number(), &information) != 0)
    throw Error(errno == ENOENT ? DLM_NOT_FOUND : refused,
                path + ": cannot read: " + std::strerror(errno));
  if (!S_ISREG(information.st_mode)) throw Error(refused, path + ": not a plain file");
  bytes_ = static_cast<size_t>(information.st_size);
  if (bytes_ == 0) return;
  const int flags = MAP_PRIVATE | (reads_all ? MAP_POPULATE : 0);
  data_ = mmap(nullptr, bytes_, PROT_READ, flags, file.number(), 0);
  if (data_ == MAP_FAILED) throw Error(refused, path + ": cannot read: " + std::strerror(errno));
}

MappedFile::~MappedFile() {
  if (bytes_ > 0) munmap(data_, bytes_);
}

}  // namespace dlm
