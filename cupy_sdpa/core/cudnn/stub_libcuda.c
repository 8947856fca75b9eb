/* A stub of libcuda.so.1 for machines without a driver, with which cuDNN can plan for a described GPU.

   cuDNN compiles its kernels with NVRTC and then loads them. Loading succeeds here and returns dummy handles. Functions that
   need a device return 100, CUDA_ERROR_NO_DEVICE. Nothing can be launched. Load this only in a process that never uses a
   GPU. */
#define HANDLE ((void *)&dummy)
static int dummy;

#define SUCCEEDS(name) int name(void) { return 0; }
#define GIVES_HANDLE(name) int name(void **out) { *out = HANDLE; return 0; }
#define NO_DEVICE(name) int name(void) { return 100; }

GIVES_HANDLE(cuLibraryLoadData) GIVES_HANDLE(cuLibraryLoadFromFile) GIVES_HANDLE(cuLibraryGetKernel)
GIVES_HANDLE(cuKernelGetFunction) GIVES_HANDLE(cuModuleLoadData) GIVES_HANDLE(cuModuleLoadDataEx)
GIVES_HANDLE(cuModuleGetFunction)
SUCCEEDS(cuLibraryUnload) SUCCEEDS(cuModuleUnload) SUCCEEDS(cuKernelSetAttribute) SUCCEEDS(cuFuncSetAttribute)

int cuKernelGetAttribute(int *value) { *value = 0; return 0; }
int cuFuncGetAttribute(int *value) { *value = 0; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no device: this libcuda is a stub"; return 0; }

NO_DEVICE(cuInit) NO_DEVICE(cuDeviceGetCount) NO_DEVICE(cuDeviceGet) NO_DEVICE(cuDeviceGetAttribute)
NO_DEVICE(cuDeviceGetName) NO_DEVICE(cuDeviceGetUuid) NO_DEVICE(cuDeviceTotalMem_v2) NO_DEVICE(cuDevicePrimaryCtxRetain)
NO_DEVICE(cuDevicePrimaryCtxRelease) NO_DEVICE(cuCtxGetCurrent) NO_DEVICE(cuCtxSetCurrent) NO_DEVICE(cuCtxPushCurrent)
NO_DEVICE(cuCtxPopCurrent) NO_DEVICE(cuCtxGetDevice) NO_DEVICE(cuCtxGetLimit) NO_DEVICE(cuCtxSynchronize)
NO_DEVICE(cuStreamGetCtx) NO_DEVICE(cuStreamGetCtx_v2) NO_DEVICE(cuStreamSynchronize) NO_DEVICE(cuMemcpyHtoD_v2)
NO_DEVICE(cuModuleGetGlobal_v2) NO_DEVICE(cuLaunchKernel) NO_DEVICE(cuLaunchKernelEx) NO_DEVICE(cuLaunchCooperativeKernel)
NO_DEVICE(cuLinkCreate) NO_DEVICE(cuLinkCreate_v2) NO_DEVICE(cuLinkAddData) NO_DEVICE(cuLinkAddData_v2)
NO_DEVICE(cuLinkComplete) NO_DEVICE(cuLinkDestroy) NO_DEVICE(cuTensorMapEncodeTiled) NO_DEVICE(cuTensorMapEncodeIm2col)
NO_DEVICE(cuOccupancyMaxActiveBlocksPerMultiprocessor) NO_DEVICE(cuOccupancyMaxActiveClusters)
NO_DEVICE(cuOccupancyMaxPotentialClusterSize) NO_DEVICE(cuGetProcAddress) NO_DEVICE(cuGetProcAddress_v2)
NO_DEVICE(cuGetExportTable)
