//! The driver of a GPU: one table of functions for CUDA and for ROCm.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr;

use crate::library::{Libraries, Loaded, Wanted, c_table, text_of};
use crate::{GpuError, error};

/// The vendor's programming interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// NVIDIA: `libcuda`, NVRTC, cuBLAS.
    Cuda,
    /// AMD: HIP, hipRTC, hipBLAS.
    Rocm,
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cuda => "CUDA",
            Self::Rocm => "ROCm",
        })
    }
}

/// An opaque object of the driver: a stream, an event, a graph, a module, a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Handle(pub(crate) *mut c_void);

impl Handle {
    pub(crate) const NULL: Self = Self(ptr::null_mut());
}

// SAFETY: a handle is a name that only the driver looks behind, and the driver may be called from
// any thread; what must not happen at once is left to the types that own handles.
unsafe impl Send for Handle {}
// SAFETY: as for `Send`.
unsafe impl Sync for Handle {}

/// The codes that both vendors share.
pub(crate) const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;

c_table! {
    struct Driver;
    init(flags: c_uint) = "cuInit", "hipInit";
    #[expect(dead_code, reason = "`check` calls past this method, which would call `check`")]
    error_string(code: c_int, text: *mut *const c_char)
        = "cuGetErrorString", "hipDrvGetErrorString";
    driver_get_version(version: *mut c_int) = "cuDriverGetVersion", "hipDriverGetVersion";
    device_get_count(n: *mut c_int) = "cuDeviceGetCount", "hipGetDeviceCount";
    device_get(device: *mut c_int, ordinal: c_int) = "cuDeviceGet", "hipDeviceGet";
    device_get_name(name: *mut c_char, len: c_int, device: c_int)
        = "cuDeviceGetName", "hipDeviceGetName";
    device_get_attribute(value: *mut c_int, attribute: c_int, device: c_int)
        = "cuDeviceGetAttribute", "hipDeviceGetAttribute";
    device_total_mem(bytes: *mut usize, device: c_int)
        = "cuDeviceTotalMem_v2", "hipDeviceTotalMem";
    ctx_synchronize() = "cuCtxSynchronize", "hipDeviceSynchronize";
    mem_get_info(free: *mut usize, total: *mut usize) = "cuMemGetInfo_v2", "hipMemGetInfo";
    mem_alloc(address: *mut u64, bytes: usize) = "cuMemAlloc_v2", "hipMalloc";
    mem_free(address: u64) = "cuMemFree_v2", "hipFree";
    mem_host_alloc(at: *mut *mut c_void, bytes: usize, flags: c_uint)
        = "cuMemHostAlloc", "hipHostMalloc";
    mem_free_host(at: *mut c_void) = "cuMemFreeHost", "hipHostFree";
    memcpy_htod_async(to: u64, from: *const c_void, bytes: usize, stream: Handle)
        = "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync";
    memcpy_dtoh_async(to: *mut c_void, from: u64, bytes: usize, stream: Handle)
        = "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync";
    memcpy_dtod_async(to: u64, from: u64, bytes: usize, stream: Handle)
        = "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync";
    memset_d8_async(to: u64, value: u8, bytes: usize, stream: Handle)
        = "cuMemsetD8Async", "hipMemsetD8Async";
    stream_create(stream: *mut Handle, flags: c_uint)
        = "cuStreamCreate", "hipStreamCreateWithFlags";
    stream_destroy(stream: Handle) = "cuStreamDestroy_v2", "hipStreamDestroy";
    stream_synchronize(stream: Handle) = "cuStreamSynchronize", "hipStreamSynchronize";
    stream_wait_event(stream: Handle, event: Handle, flags: c_uint)
        = "cuStreamWaitEvent", "hipStreamWaitEvent";
    stream_begin_capture(stream: Handle, mode: c_int)
        = "cuStreamBeginCapture_v2", "hipStreamBeginCapture";
    stream_end_capture(stream: Handle, graph: *mut Handle)
        = "cuStreamEndCapture", "hipStreamEndCapture";
    graph_get_nodes(graph: Handle, nodes: *mut Handle, n: *mut usize)
        = "cuGraphGetNodes", "hipGraphGetNodes";
    graph_instantiate(exec: *mut Handle, graph: Handle, flags: u64)
        = "cuGraphInstantiateWithFlags", "hipGraphInstantiateWithFlags";
    graph_launch(exec: Handle, stream: Handle) = "cuGraphLaunch", "hipGraphLaunch";
    graph_exec_destroy(exec: Handle) = "cuGraphExecDestroy", "hipGraphExecDestroy";
    graph_destroy(graph: Handle) = "cuGraphDestroy", "hipGraphDestroy";
    event_create(event: *mut Handle, flags: c_uint)
        = "cuEventCreate", "hipEventCreateWithFlags";
    event_destroy(event: Handle) = "cuEventDestroy_v2", "hipEventDestroy";
    event_record(event: Handle, stream: Handle) = "cuEventRecord", "hipEventRecord";
    event_synchronize(event: Handle) = "cuEventSynchronize", "hipEventSynchronize";
    event_elapsed_time(ms: *mut f32, start: Handle, end: Handle)
        = "cuEventElapsedTime", "hipEventElapsedTime";
    module_load_data(module: *mut Handle, image: *const c_void)
        = "cuModuleLoadData", "hipModuleLoadData";
    module_unload(module: Handle) = "cuModuleUnload", "hipModuleUnload";
    module_get_function(function: *mut Handle, module: Handle, name: *const c_char)
        = "cuModuleGetFunction", "hipModuleGetFunction";
    func_get_attribute(value: *mut c_int, attribute: c_int, function: Handle)
        = "cuFuncGetAttribute", "hipFuncGetAttribute";
    #[expect(clippy::too_many_arguments, reason = "the vendors' function")]
    launch_kernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint,
        stream: Handle, params: *mut *mut c_void, extra: *mut *mut c_void
    ) = "cuLaunchKernel", "hipModuleLaunchKernel";
}

impl Driver {
    pub(crate) fn wanted(api: Api) -> Wanted {
        match api {
            Api::Cuda => Wanted {
                what: "the NVIDIA driver",
                names: &["libcuda.so.1"],
                help: "install the driver of the GPU, or choose --device cpu",
            },
            Api::Rocm => Wanted {
                what: "the HIP runtime of ROCm",
                names: &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"],
                help: "install ROCm 6 or later (package hip-runtime-amd; Debian: libamdhip64-6) \
                       or a ROCm build of PyTorch, and put its lib folder on LD_LIBRARY_PATH, or \
                       choose --device cpu",
            },
        }
    }

    /// Loads and initialises the driver, and counts its devices.
    pub(crate) fn load(api: Api, libraries: &Libraries) -> Result<(Self, Loaded, u32), GpuError> {
        let library = libraries.load(&Self::wanted(api))?;
        let driver = Self::fill(&library, api)?;
        let mut n_devices = 0;
        // SAFETY: no flag is defined.
        let initialised = unsafe { driver.init(0) };
        // SAFETY: the count is written where it points.
        let counted = initialised.and_then(|()| unsafe { driver.device_get_count(&mut n_devices) });
        match counted {
            Ok(()) => {}
            // A driver without a device says so by failing.
            Err(GpuError::Call { code: NO_DEVICE, .. }) => n_devices = 0,
            Err(error) => return Err(error),
        }
        Ok((driver, library, n_devices.unsigned_abs()))
    }

    /// The driver's own text for its code.
    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<(), GpuError> {
        if code == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: the driver writes the address of a constant of its own, or null.
        unsafe { (self.error_string.call)(code, &mut text) };
        // SAFETY: as the driver wrote it.
        let text = unsafe { text_of(text) };
        Err(GpuError::Call { call, code, text })
    }

    /// An out-of-memory code of `outcome` with the sizes at hand.
    pub(crate) fn with_sizes(
        &self,
        outcome: Result<(), GpuError>,
        requested: usize,
    ) -> Result<(), GpuError> {
        match outcome {
            Err(GpuError::Call { call, code: OUT_OF_MEMORY, .. }) => {
                let (free, total) = self.memory().unwrap_or_default();
                Err(GpuError::OutOfMemory { call, requested, free, total })
            }
            other => other,
        }
    }

    /// Free and total bytes of the current device.
    pub(crate) fn memory(&self) -> Result<(usize, usize), GpuError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are written where they point.
        unsafe { self.mem_get_info(&mut free, &mut total) }?;
        Ok((free, total))
    }

    pub(crate) fn attribute(&self, attribute: c_int, device: c_int) -> Result<usize, GpuError> {
        let mut value = 0;
        // SAFETY: the value is written where it points.
        unsafe { self.device_get_attribute(&mut value, attribute, device) }?;
        usize::try_from(value)
            .or_else(|_| error::invalid(format!("device attribute {attribute} is {value}")))
    }
}
