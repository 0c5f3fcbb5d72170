//! The connections of a port.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Sleep, sleep};
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::server::{Connected, TcpConnectInfo, TcpIncoming};

/// What HTTP/2 clients send first, in bytes. Behind it keepalive sees to the connection.
const PREFACE_BYTES: usize = 24;
/// How long nothing is accepted after the system had no connection to give.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The connections that `listener` accepts, each of which must open within `opening_timeout`.
pub(crate) fn incoming(
    listener: TcpListener,
    opening_timeout: Duration,
) -> impl Stream<Item = io::Result<Connection>> {
    let accepted = TcpIncoming::from(listener).with_nodelay(Some(true));
    accepted.then(move |stream| async move {
        match stream {
            Ok(stream) => Ok(Connection {
                stream,
                n_missing: PREFACE_BYTES,
                limit: Box::pin(sleep(opening_timeout)),
            }),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                // Out of files, most likely: the next attempt would fail as well.
                sleep(ACCEPT_PAUSE).await;
                Err(error)
            }
        }
    })
}

/// A connection that fails if its client does not begin to speak soon.
pub(crate) struct Connection {
    stream: TcpStream,
    n_missing: usize,
    limit: Pin<Box<Sleep>>,
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let n_before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if read.is_pending() && self.n_missing > 0 {
            ready!(self.limit.as_mut().poll(cx));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        ready!(read)?;
        self.n_missing = self.n_missing.saturating_sub(buf.filled().len() - n_before);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
